"""The same requests to prefill/decode pairs through PyPI's `sglang-router` and through us: what differs.

    make compare-pd     # writes the tables of docs/pd.md

Workers are `dyn-mock-worker` processes, so this needs no engine. What both routers' clients get is compared with what
one mock worker of the same model says that is no pair (law 5). Each fault befalls the first request of one of two
workers of a role; two requests follow each other, so that one of them meets it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio
from answers import Target, differences, told
from peers import ROUTER_REQUIREMENT, python_with

from dyn_chaos.engines import Server, listen, mock, script
from dyn_chaos.processes import Child, free_port
from dyn_testkit.client import Response
from dyn_testkit.laws.answers import read_answer

PAGE = Path(__file__).parents[2] / "docs" / "pd.md"
#: What is between these lines of the page is made here.
BEGIN, END = "<!-- made by tests/live/compare_pd.py -->", "<!-- end -->"
OURS, THEIRS = "ours", "sglang-router"
#: Seconds that a request may take; legs that are left alone wait less.
SECONDS = 30.0
MODEL = ("--with-tokenizer", "--vocab-size", "258", "--routed-experts", "--tick", "0.01")
LEG = (*MODEL, "--bootstrap-timeout", "8", "--waiting-timeout", "8", "--heartbeat", "1")
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
IDS, TEXT = {"input_ids": [5, 6, 7, 8]}, {"text": "Hello"}
PROBS = {"return_logprob": True, "logprob_start_len": 0}

#: (what, body): `sampling_params` are added to the greedy ones.
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("token ids", IDS),
    ("text", TEXT),
    ("batch of token ids", {"input_ids": [[5, 6], [7, 8, 9]]}),
    ("batch of texts", {"text": ["Hello", "you"]}),
    ("batch of one", {"input_ids": [[5, 6]]}),
    ("logprobs of the output", {**IDS, "return_logprob": True}),
    ("logprobs of the prompt", {**IDS, **PROBS}),
    ("top logprobs of the prompt", {**IDS, **PROBS, "top_logprobs_num": 2}),
    ("logprobs of chosen ids", {**IDS, **PROBS, "token_ids_logprob": [3, 4]}),
    ("a batch's logprobs", {"input_ids": [[5, 6], [7, 8, 9]], **PROBS, "top_logprobs_num": 2}),
    ("routed experts", {**IDS, "return_routed_experts": True}),
    ("one token, its experts", {**IDS, "return_routed_experts": True, "sampling_params": {"max_new_tokens": 1}}),
    ("no token", {**IDS, "sampling_params": {"max_new_tokens": 0}}),
    ("ids of the prompt", {**IDS, "return_prompt_token_ids": True}),
    ("n = 2", {**IDS, "sampling_params": {"n": 2}}),
    ("a room of the client's", {**IDS, "bootstrap_room": 7}),
    ("a room of 2^63-1, and a host", {**IDS, "bootstrap_host": "127.0.0.1", "bootstrap_room": 2**63 - 1}),
    ("a field that nobody knows", {**IDS, "of_mine": [1, 2.5, None]}),
    ("top_p of 2", {**IDS, "sampling_params": {"top_p": 2.0}}),
    ("an unknown sampling parameter", {**IDS, "sampling_params": {"temprature": 0}}),
    ("no prompt", {}),
    ("a prompt that is too long", {"input_ids": [5] * 140_000}),
)
#: (what befalls, the leg, how it is spelled)
FAULTS = (
    ("answers 500", "prefill", "500@head"),
    ("answers 500", "decode", "500@head"),
    ("answers 503, its queue is full", "prefill", "503@head"),
    ("answers 503, its queue is full", "decode", "503@head"),
    ("fails inside its answer", "prefill", "abort500@transferred"),
    ("fails after 3 tokens", "decode", "abort500@3"),
    ("is killed before the legs have met", "prefill", "kill@bootstrap"),
    ("is killed before the legs have met", "decode", "kill@bootstrap"),
    ("is killed during the transfer", "prefill", "kill@transfer"),
    ("is killed during the transfer", "decode", "kill@transfer"),
    ("is killed after the transfer", "prefill", "kill@transferred"),
    ("is killed after the transfer", "decode", "kill@transferred"),
    ("is killed after 3 tokens", "decode", "kill@3"),
    ("is silent before the transfer", "prefill", "stall@bootstrap"),
)


@dataclass(frozen=True)
class Fleet:
    """Running workers, and who stands before them."""

    prefills: list[Server]
    decodes: list[Server]
    routers: dict[str, Target]


def target(name: str, url: str) -> Target:
    """Of a URL."""
    host, _, port = url.removeprefix("http://").partition(":")
    return Target(name, host, int(port))


@asynccontextmanager
async def fleet(
    logs: Path, router: str, names: tuple[str, ...], count: int = 1, leg: str = "", fault: str = ""
) -> AsyncIterator[Fleet]:
    """`count` workers of each role behind the named routers; `fault` is that of the first request of `leg`'s first."""
    async with trio.open_nursery() as nursery:
        ports = [free_port() for _ in range(count)]
        workers: dict[str, list[Server]] = {"prefill": [], "decode": []}
        for role, found in workers.items():
            for number in range(count):
                flags = [*LEG, "--disaggregation-mode", role]
                flags += ["--disaggregation-bootstrap-port", str(ports[number])] if role == "prefill" else []
                flags += ["--fault", f"0:{fault}"] if (role, number) == (leg, 0) else []
                found.append(await mock(nursery, f"{role}{number}", logs, flags))
        prefills, decodes = workers["prefill"], workers["decode"]
        pairs = [(worker.url, str(port)) for worker, port in zip(prefills, ports, strict=True)]
        routers = {}
        if OURS in names:
            argv = [script("dyn-relay"), "serve", "--port", "0", "--pd-disaggregation", "--policy", "round_robin"]
            argv += ["--prefill", *(each for pair in pairs for each in pair), "--first-token-timeout-secs", "10"]
            argv += ["--decode", *(worker.url for worker in decodes)]
            routers[OURS] = target(OURS, (await listen(nursery, OURS, argv, logs)).url)
        if THEIRS in names:
            port, spare = free_port(), free_port()
            argv = [router, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
            argv += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
            argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(spare), "--pd-disaggregation"]
            for pair in pairs:
                argv += ["--prefill", *pair]
            for worker in decodes:
                argv += ["--decode", worker.url]
            await Child.start(nursery, THEIRS, argv, log=logs / f"{THEIRS}.log", ready=None)
            routers[THEIRS] = Target(THEIRS, "127.0.0.1", port)
        for one in routers.values():
            await _serves(one)
        yield Fleet(prefills, decodes, routers)
        nursery.cancel_scope.cancel()


async def _serves(router: Target) -> None:
    """Return once it knows its workers. Raises `TimeoutError`."""
    with trio.move_on_after(60):
        while True:
            try:
                answer = await ask(router, b"", "GET", "/v1/models" if router.name == THEIRS else "/readiness")
                if answer.status == 200:
                    return
            except OSError:
                pass  # not yet
            await trio.sleep(0.2)
    raise TimeoutError(f"{router.name} does not serve")


async def ask(who: Target, body: bytes, method: str = "POST", path: str = "/generate") -> Response:
    """The answer, as far as it comes within `SECONDS`."""
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    wire, late = b"", True
    with trio.move_on_after(SECONDS):
        stream = await trio.open_tcp_stream(who.host, who.port)
        async with stream:
            await stream.send_all(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            try:
                async for data in stream:
                    wire += data
            except trio.BrokenResourceError:
                pass
            late = False
    answer = read_answer(wire)
    if late:
        answer.broken = f"nothing more within {SECONDS:.0f} s"
    return answer


def spelled(body: dict[str, Any], *, stream: bool) -> bytes:
    """A body with what all have."""
    return json.dumps({**body, "sampling_params": GREEDY | body.get("sampling_params", {}), "stream": stream}).encode()


def plain(answer: Response) -> dict[str, Any]:
    """An answer, as far as it can be compared; headers are `make compare`'s business."""
    found = told(answer, "\0", by_chance=False)
    return {name: value for name, value in found.items() if name != "headers"}


async def same_requests(logs: Path, router: str) -> list[tuple[str, str, str]]:
    """(request, what we do, what the other does), where one of the two differs from one worker."""
    found = []
    async with trio.open_nursery() as nursery, fleet(logs, router, (OURS, THEIRS)) as running:
        direct = target("direct", (await mock(nursery, "direct", logs, MODEL)).url)
        for what, body in REQUESTS:
            for stream in (False, True):
                sent = spelled(body, stream=stream)
                wanted = plain(await ask(direct, sent))
                words = {}
                for name, one in running.routers.items():
                    words[name] = "; ".join(differences(wanted, plain(await ask(one, sent)))) or "the same"
                    await _idle(running)
                found.append((f"{what}, {'stream' if stream else 'unary'}", words[OURS], words[THEIRS]))
                click.echo(found[-1])
        nursery.cancel_scope.cancel()
    return found


async def leavers(logs: Path, router: str) -> list[tuple[str, str, str]]:
    """Seconds until both legs are idle once a client has left."""
    found = []
    body = {**IDS, "sampling_params": {"max_new_tokens": 4000}}
    async with fleet(logs, router, (OURS, THEIRS)) as running:
        for when in ("at once", "amid the answer"):
            for stream in (True, False):
                words = {}
                for name, one in running.routers.items():
                    connection = await trio.open_tcp_stream(one.host, one.port)
                    sent = spelled(body, stream=stream)
                    head = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
                    await connection.send_all(f"{head}{len(sent)}\r\n\r\n".encode() + sent)
                    await _until(running, idle=False)
                    if when != "at once":
                        await trio.sleep(1)
                    await connection.aclose()
                    began = trio.current_time()
                    await _idle(running)
                    took = trio.current_time() - began
                    words[name] = f"both legs free after {took:.1f} s" if took < SECONDS else "still at work"
                    await trio.sleep(1)
                found.append((f"leaves {when}, {'stream' if stream else 'unary'}", words[OURS], words[THEIRS]))
                click.echo(found[-1])
    return found


async def partial_failures(logs: Path, router: str) -> list[tuple[str, str, str]]:
    """What two clients get, one after the other, when a leg of the first attempt there fails."""
    found = []
    async with trio.open_nursery() as nursery:
        direct = target("direct", (await mock(nursery, "direct", logs, MODEL)).url)
        for what, leg, fault in FAULTS:
            for stream in (False, True):
                sent = spelled({**IDS, **PROBS}, stream=stream)
                wanted = plain(await ask(direct, sent))
                words = {}
                for name in (OURS, THEIRS):
                    async with fleet(logs, router, (name,), 2, leg, fault) as running:
                        said = []
                        for _ in range(2):
                            began = trio.current_time()
                            answer = await ask(running.routers[name], sent)
                            took = trio.current_time() - began
                            said.append(_said(wanted, answer, took))
                        words[name] = said[0] if said[0] == said[1] else " / ".join(said)
                found.append((f"{leg} {what}, {'stream' if stream else 'unary'}", words[OURS], words[THEIRS]))
                click.echo(found[-1])
        nursery.cancel_scope.cancel()
    return found


def _said(wanted: dict[str, Any], answer: Response, took: float) -> str:
    got = plain(answer)
    rest = [each for each in differences(wanted, got) if "input_token_logprobs" not in each]
    late = f" after {took:.0f} s" if took > 2 else ""
    if not list(differences(wanted, got)):
        return f"exact{late}"
    if not rest:
        return f"exact but for the prompt's logprobs{late}"
    if answer.status != 200:
        return f"{answer.status}{late}"
    if answer.broken:
        return f"broken off ({answer.broken}){late}"
    return f"200, with an error or a part of the answer{late}"


async def _until(running: Fleet, *, idle: bool) -> None:
    while await _busy(running) == idle:  # noqa: ASYNC110 - other processes
        await trio.sleep(0.02)


async def _idle(running: Fleet) -> None:
    with trio.move_on_after(SECONDS):
        await _until(running, idle=True)


async def _busy(running: Fleet) -> bool:
    for worker in (*running.prefills, *running.decodes):
        loads = await ask(target("", worker.url), b"", "GET", "/v1/loads?include=core")
        if any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads.json()["loads"]):
            return True
    return False


def table(head: str, rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """In Markdown."""
    yield f"| {head} | through us | through `sglang-router` 0.3.2 |"
    yield "|---|---|---|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""


async def compare(logs: Path, router: str) -> Iterator[str]:
    """The lines of the page."""
    requests = await same_requests(logs, router)
    differing = [row for row in requests if row[1:] != ("the same", "the same")]
    lines = [f"{len(requests)} requests; these are not answered as one worker answers them, by one or by both:", ""]
    lines += table("request", differing)
    lines += ["A client that leaves:", "", *table("client", await leavers(logs, router))]
    lines += ["A leg that fails (two requests, one after the other, if they fared differently):", ""]
    return iter([*lines, *table("leg", await partial_failures(logs, router))])


@click.command()
@click.option("--out", type=click.Path(path_type=Path, exists=True), default=PAGE)
def main(out: Path) -> None:
    """Write the tables into the page."""
    with tempfile.TemporaryDirectory() as logs:
        lines = trio.run(partial(compare, Path(logs), python_with(ROUTER_REQUIREMENT)))
    before, _, rest = out.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    out.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
