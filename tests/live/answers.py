"""Raw requests to whoever answers `/generate`, and how two answers to the same differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import trio

from dyn_testkit.client import Response
from dyn_testkit.laws.answers import read_answer

#: Measured, or of the moment.
MEASURED = frozenset(
    {"cached_tokens", "cached_tokens_details", "e2e_latency", "response_sent_to_client_ts", "weight_version"}
)
#: What hangs on the draws.
DRAWN = frozenset(
    {
        *("text", "output_ids", "finish_reason", "completion_tokens", "weight_versions"),
        *("output_token_logprobs", "output_top_logprobs", "output_token_logprobs_length"),
    }
)
#: Ours, on every answer that a worker takes part in.
DOCUMENTED = "x-dyn-relay-migratable"
#: Of each hop, or of the moment.
HOP = frozenset({"date", "server", "connection", "content-length", "transfer-encoding", "keep-alive"})
#: An answer takes no longer.
SECONDS = 60.0


@dataclass(frozen=True)
class Target:
    """Somebody who answers `/generate`."""

    name: str
    host: str
    port: int


async def ask(target: Target, request: bytes) -> Response:
    """The answer to raw bytes, until the other side closes."""
    wire = b""
    with trio.move_on_after(SECONDS):
        stream = await trio.open_tcp_stream(target.host, target.port)
        async with stream:
            await stream.send_all(request)
            try:
                async for data in stream:
                    wire += data
            except trio.BrokenResourceError:
                pass
    return read_answer(wire)


def told(response: Response, suffix: str, *, by_chance: bool) -> dict[str, Any]:
    """An answer, as far as it can be compared."""
    headers = {
        key.decode(): value.decode()
        for key, value in response.headers
        if key.decode() not in HOP and key.decode() != DOCUMENTED
    }
    body = response.body.decode("utf-8", "replace").replace(suffix, "")
    kind = headers.get("content-type", "")
    found: dict[str, Any] = {"status": response.status, "headers": headers, "broken": response.broken}
    if kind.startswith("text/event-stream"):
        events = [event for event in body.split("\n\n") if event]
        last: dict[Any, Any] = {}
        for event in events:
            value = _json(event.removeprefix("data: "))
            if isinstance(value, dict):
                last[value.get("index")] = value
        found["last events"] = _plain(last, by_chance=by_chance)
        found["end"] = events[-1] if events and not isinstance(_json(events[-1].removeprefix("data: ")), dict) else ""
    else:
        value = _json(body)
        found["body"] = body if value is None else _plain(value, by_chance=by_chance)
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _plain(value: Any, *, by_chance: bool, name: str = "") -> Any:
    """Without what is measured, or made up: rids are 32 hexadecimal digits; over gRPC engines put dashes in."""
    if isinstance(value, dict):
        out = MEASURED | DRAWN if by_chance else MEASURED
        told = {str(key): each for key, each in value.items() if key not in out}
        return {key: _plain(each, by_chance=by_chance, name=key) for key, each in told.items()}
    if isinstance(value, list):
        return [_plain(each, by_chance=by_chance, name=name) for each in value]
    if isinstance(value, str):
        return re.sub(r"\b[0-9a-f]{8}(-?)([0-9a-f]{4}\1){3}[0-9a-f]{12}\b", "<rid>", value)
    return round(value, 3) if isinstance(value, float) else value


def differences(one: Any, two: Any, path: str = "") -> Iterator[str]:
    """Where two comparable answers differ, in words."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in sorted({*one, *two}):
            if key not in two:
                yield f"{path}{key} is missing"
            elif key not in one:
                yield f"{path}{key} is added: {_short(two[key])}"
            else:
                yield from differences(one[key], two[key], f"{path}{key}.")
    elif one != two:
        yield f"{path.rstrip('.')}: {_short(two)} instead of {_short(one)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 90 else text[:87] + "..."


async def freed(target: Target, engine: Target, *, stream: bool) -> float | None:
    """A client leaves; seconds until the engine has no work any more. None: it still had after a minute."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}, "stream": stream}
    data = json.dumps(body).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    connection = await trio.open_tcp_stream(target.host, target.port)
    await connection.send_all(head % len(data) + data)
    await _until(engine, working=True)
    if stream:
        await connection.receive_some()
    await connection.aclose()
    began = trio.current_time()
    with trio.move_on_after(SECONDS):
        await _until(engine, working=False)
        return trio.current_time() - began
    return None


async def _until(engine: Target, *, working: bool) -> None:
    while await _working(engine) != working:  # noqa: ASYNC110 - another process
        await trio.sleep(0.05)


async def _working(engine: Target) -> bool:
    response = await ask(engine, b"GET /v1/loads?include=core HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    return any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in response.json()["loads"])


def address(url: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)
