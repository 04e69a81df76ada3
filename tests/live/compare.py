"""Each recorded request to a stock engine directly, through PyPI's `sglang-router`, and through us: what differs.

    make compare        # writes docs/compatibility.md

The requests are those of `tests/contract/captures`: texts and token ids, batches, n, logprob options, PUT, fields that
nobody knows, every error. What an engine measures is left out, and what it samples by chance; logprobs are compared to
three digits. Requests that kill a stock engine are not sent.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import trio
from lab import Lab
from peers import ROUTER_REQUIREMENT, python_with

from dyn_chaos.processes import Child, free_port
from dyn_testkit.client import Response
from dyn_testkit.laws.answers import read_answer

ROOT = Path(__file__).parents[2]
CAPTURES = ROOT / "tests" / "contract" / "captures"
#: (flavour of the engine, folder of recordings that were made with one like it)
RUNS = (("cumulative", "cumulative"), ("text", "tokenizer"))
PREFIXES = ("s_", "u_", "err_", "put_", "get_generate", "head_", "options_", "not_found")
#: These kill a stock engine (0.5.23), or wedge it.
DEADLY = ("neg_id", "oov_id", "err_logprob_start_neg", "err_top_logprobs_huge")
#: Sampled by chance.
CHANCE = ("sampled", "no_sampling_params", "n2", "n3")
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
SECONDS = 60.0


@dataclass(frozen=True)
class Target:
    """Somebody who answers `/generate`."""

    name: str
    host: str
    port: int


def requests(folder: str) -> Iterator[tuple[str, bytes]]:
    """The recorded requests, by name."""
    for path in sorted((CAPTURES / folder).glob("*.req")):
        name = path.stem
        if name.startswith(PREFIXES) and not name.endswith(DEADLY):
            yield f"{folder}/{name}", path.read_bytes()


def renamed(request: bytes, suffix: str) -> bytes:
    """With other rids: an engine aborts a rid two seconds after its stream has ended, whoever has it then."""
    head, _, body = request.partition(b"\r\n\r\n")
    try:
        value = json.loads(body)
    except ValueError:
        return request
    rids = value.get("rid") if isinstance(value, dict) else None
    for rid in rids if isinstance(rids, list) else [rids]:
        if isinstance(rid, str) and rid:
            quoted = json.dumps(rid).encode()
            body = body.replace(quoted, quoted[:-1] + suffix.encode() + b'"')
    head = re.sub(rb"(?i)content-length: *\d+", b"Content-Length: %d" % len(body), head)
    return head + b"\r\n\r\n" + body


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
    """Without what is measured, or made up: rids of our own are 32 hexadecimal digits, as the engine's are."""
    if isinstance(value, dict):
        out = MEASURED | DRAWN if by_chance else MEASURED
        told = {str(key): each for key, each in value.items() if key not in out}
        return {key: _plain(each, by_chance=by_chance, name=key) for key, each in told.items()}
    if isinstance(value, list):
        return [_plain(each, by_chance=by_chance, name=name) for each in value]
    if isinstance(value, str):
        return re.sub(r"\b[0-9a-f]{32}\b", "<rid>", value)
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


async def _compare(home: Path, router: str) -> list[tuple[str, str, list[str]]]:
    """(request, through whom, differences), for all requests and both."""
    found: list[tuple[str, str, list[str]]] = []
    logs = home / "logs"
    for flavour, folder in RUNS:
        async with trio.open_nursery() as nursery:
            lab = Lab.of(home, flavour, nursery)
            [engine] = await lab.engines("a")
            relay = await lab.relay(nursery, [engine], "compare", ())
            port, spare = free_port(), free_port()
            argv = [
                *(router, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
                *("--policy", "round_robin", "--worker-startup-check-interval", "1", "--prometheus-host", "127.0.0.1"),
                *("--prometheus-port", str(spare), "--worker-urls", engine.url),
            ]
            log = logs / f"router-{flavour}.log"
            ready = re.compile("(?i)starting server|listening|started")
            await Child.start(nursery, f"router-{flavour}", argv, log=log, ready=ready)
            await trio.sleep(3)  # it says that it has started before it knows its worker
            direct = Target("direct", *address(engine.url))
            others = [Target("ours", *address(relay.url)), Target("sglang-router", "127.0.0.1", port)]
            for name, request in requests(folder):
                by_chance = any(word in name for word in CHANCE)
                answers = {}
                for target in (direct, *others):
                    suffix = f"-{target.name}"
                    response = await ask(target, renamed(request, suffix))
                    answers[target.name] = told(response, suffix, by_chance=by_chance)
                    if target.name == "ours" and "/generate" in request.decode("latin-1").split("\r\n")[0]:
                        header = response.header(DOCUMENTED)
                        if header is None:
                            answers["ours"]["headers"][DOCUMENTED] = "missing"
                found += [(name, one.name, list(differences(answers["direct"], answers[one.name]))) for one in others]
                click.echo(f"{name}: ours {len(found[-2][2])}, sglang-router {len(found[-1][2])}")
            for stream in (True, False):
                for target in (direct, *others):
                    seconds = await freed(target, direct, stream=stream)
                    what = f"{folder}/a client that leaves, {'streaming' if stream else 'unary'}"
                    took = "still at work after 60 s" if seconds is None else f"free after {seconds:.1f} s"
                    found.append((what, target.name, [took]))
                    click.echo(f"{what}, {target.name}: {took}")
            await lab.engines("")
            nursery.cancel_scope.cancel()
    return found


def address(url: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def page(found: list[tuple[str, str, list[str]]]) -> str:
    """The page: our differences, all of them; the other router's, by kind."""
    compared = [entry for entry in found if "a client that leaves" not in entry[0]]
    ours = [(name, differing) for name, who, differing in compared if who == "ours" and differing]
    theirs: dict[str, dict[str, str]] = {}
    for name, who, differing in compared:
        for one in differing if who == "sglang-router" else ():
            what, _, how = one.partition(": ")
            theirs.setdefault(what, {})[name] = how
    total = len(compared) // 2
    text = _HEAD.format(total=total, ours=len(ours), header=DOCUMENTED)
    text += "## Ours\n\n"
    text += "".join(f"- `{name}`: {'; '.join(differing)}\n" for name, differing in ours) or "None.\n"
    count = len({name for names in theirs.values() for name in names})
    beyond = len({name for what, names in theirs.items() if not what.startswith("headers.") for name in names})
    text += (
        f"\n## `sglang-router` 0.3.2\n\n{count} of {total} requests are answered otherwise, {beyond} of them in more "
    )
    text += f"than headers: {_WHY}\n\n"
    text += "| what is not the engine's | requests | one of them | how |\n|---|---|---|---|\n"
    for what, names in sorted(theirs.items(), key=lambda item: (-len(item[1]), item[0])):
        name, how = next(iter(names.items()))
        text += f"| {what} | {len(names)} | `{name}` | {how.replace('|', chr(92) + '|')} |\n"
    text += "\n## A client that leaves\n\n| | engine |\n|---|---|\n"
    for name, who, took in found:
        if "a client that leaves" in name:
            text += f"| {name}, {who} | {took[0]} |\n"
    return text


_HEAD = """# Compatibility

Made by `make compare` (`tests/live/compare.py`): the {total} requests of `tests/contract/captures` (token ids, texts,
batches, `n`, logprob options, PUT, fields that nobody knows, every error) to a stock SGLang 0.5.23 on the CPU directly,
through us, and through PyPI's `sglang-router` 0.3.2. Compared are status, end-to-end headers, and bodies: of a stream
the last event of each answer, errors, and the end. Left out is what an engine measures ({measured}),
what it samples by chance, and rids that nobody chose; logprobs are compared to three digits.

Through us {ours} answers differ, but for the header `{header}`, which every answer has.

""".replace("{measured}", ", ".join(f"`{name}`" for name in sorted(MEASURED)))


_WHY = """it reads each request into a type of its own and writes it anew, so what that type does not know is lost or
refused (422, in its own words, as plain text), numbers are spelled otherwise, and each answer gets its CORS headers."""


@click.command()
@click.option("--home", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "docs" / "compatibility.md")
def main(home: Path, out: Path) -> None:
    """Exits with 1 if an answer of ours differs."""
    found = trio.run(_compare, home, python_with(ROUTER_REQUIREMENT))
    out.write_text(page(found))
    sys.exit(any(differing for name, who, differing in found if who == "ours" and "leaves" not in name))


if __name__ == "__main__":
    main()
