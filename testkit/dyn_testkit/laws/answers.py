"""Reading an answer as clients do: h11, httpx, and the loop over `data:` lines that rollout frameworks have."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import h11

from dyn_testkit.client import Response
from dyn_testkit.oracle import PER_TOKEN, fold
from dyn_testkit.worker import Dialect

if TYPE_CHECKING:
    import httpx

DIALECTS: tuple[Dialect, ...] = ("cumulative", "incremental", "mixed")


def read_answer(wire: bytes) -> Response:
    """The first answer in some bytes of a connection, as far as h11 can read it."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    parser.send(h11.EndOfMessage())
    response = Response(wire=wire)
    parser.receive_data(wire)
    if wire:
        parser.receive_data(b"")
    try:
        while not isinstance(event := parser.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            if event is h11.NEED_DATA:
                response.broken = "eof"
                return response
            if isinstance(event, h11.Response):
                response.status, response.headers = event.status_code, list(event.headers)
            elif isinstance(event, h11.Data):
                response.body += event.data
        response.complete = isinstance(event, h11.EndOfMessage)
    except h11.RemoteProtocolError as exc:
        response.broken = str(exc)
    return response


def httpx_reads(wire: bytes) -> Response | None:
    """The same through httpx; None if it raises. Needs httpx; not for use by two threads."""
    import httpcore
    import httpx

    client, transport = _httpx_client()
    transport._pool = httpcore.ConnectionPool(network_backend=httpcore.MockBackend([wire]))
    try:
        got = client.post("http://worker/generate", content=b"{}")
    except httpx.HTTPError:
        return None
    finally:
        transport._pool.close()
    headers = [(name.lower(), value) for name, value in got.headers.raw]
    return Response(status=got.status_code, headers=headers, body=got.content, complete=True)


@functools.cache
def _httpx_client() -> tuple[httpx.Client, httpx.HTTPTransport]:
    """One for all: making one costs more than an example of a property may."""
    import httpx

    transport = httpx.HTTPTransport(verify=False)  # no TLS here
    return httpx.Client(transport=transport), transport


def sample(response: Response, *, streaming: bool) -> list[int] | None:
    """The tokens of the finished sample that a careless rollout client takes an answer for; None if it takes none.

    As the published ones do it: lines that begin with `data:` are events, `[DONE]` ends the stream, what is not JSON or
    has no `meta_info` is skipped, and a `finish_reason` other than `abort` makes the sample a finished one. Whether the
    framing was complete is not asked: that is the HTTP library's business.
    """
    if response.status != 200:
        return None
    return skim(response.body)[1] if streaming else _finished(parsed(response.body))


def skim(body: bytes) -> tuple[list[int], list[int] | None]:
    """All tokens that such a client finds in a stream's body, and those of the finished sample, if there is one."""
    tokens: list[int] = []
    finished: list[int] | None = None
    for line in body.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        value = parsed(data)
        if isinstance(value, dict) and "meta_info" in value:
            ids = value.get("output_ids") or []
            total = value["meta_info"].get("completion_tokens", 0)
            tokens = ids if len(ids) == total else tokens + ids
            finished = tokens if _finished(value) is not None else finished
    return tokens, finished


def parsed(data: bytes) -> Any:
    """A JSON value; None if it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return None


def ended(value: Any) -> dict[str, Any] | None:
    """The finish in an event or an answer; None if it has none."""
    meta = value.get("meta_info") if isinstance(value, dict) else None
    found: dict[str, Any] | None = meta.get("finish_reason") if isinstance(meta, dict) else None
    return found or None


def _finished(value: Any) -> list[int] | None:
    reason = ended(value)
    if reason is None or reason["type"] == "abort":
        return None
    ids: list[int] = value.get("output_ids") or []
    return ids


def folded(response: Response) -> dict[str, Any]:
    """The unary answer that a stream adds up to, in the dialect that it is spoken in. Raises `AssertionError`."""
    events = response.values()
    for dialect in DIALECTS:
        if not any(misspelt(events, at, dialect) for at in range(len(events))):
            return fold(events, dialect)
    raise AssertionError(f"a stream in no dialect, or in several\n  {events!r}")


def misspelt(events: Sequence[Mapping[str, Any]], at: int, dialect: Dialect) -> str:
    """What is wrong with the length of an event's lists if the stream is spoken in `dialect`; "" for nothing."""
    meta = events[at]["meta_info"]
    total = meta["completion_tokens"]
    before = events[at - 1]["meta_info"]["completion_tokens"] if at else 0
    lists = {name: meta[name] for name in PER_TOKEN if name in meta}
    for name, value in {"output_ids": events[at]["output_ids"], **lists}.items():
        deltas = dialect == "incremental" or (dialect == "mixed" and name == "output_ids")
        wanted = total - before if deltas else total
        if len(value) != wanted:
            return f"event {at}: {name} has {len(value)} entries, {dialect} wants {wanted}"
    return ""
