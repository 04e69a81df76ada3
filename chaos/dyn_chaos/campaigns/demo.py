"""The demonstration: a stream's worker is killed in mid-stream, and the answer is compared with an oracle's.

Two mock workers behind the proxy, one SSE stream and one unary request beside it. What the engine model must say is
computed by `dyn_testkit.oracle`, which shares no code with the workers' answers or with the proxy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from dyn_chaos import engines
from dyn_chaos.audit import busiest
from dyn_chaos.load import Plan, client, metrics, send, total
from dyn_testkit import fold
from dyn_testkit.engine import Model
from dyn_testkit.history import Record
from dyn_testkit.oracle import Oracle, differences
from dyn_testkit.watch import Watch

TOKENS = 256
#: The worker dies once the client of the stream has seen this many tokens.
DEATH = 100
#: Seconds a token: the whole takes about three seconds.
TICK = "0.005"

STREAM, UNARY = "stream", "unary"
BODY: dict[str, Any] = {
    "input_ids": [101, 202, 303, 404, 505],
    "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
}
PLANS = {
    STREAM: Plan(STREAM, {**BODY, "rid": "demo-stream", "stream": True}),
    UNARY: Plan(UNARY, {**BODY, "rid": "demo-unary", "input_ids": [7, 8, 9]}),
}


async def demo(logs: Path, console: Console | None = None) -> bool:
    """Run it; True if everything was as it should be."""
    console = console or Console()
    async with trio.open_nursery() as nursery:
        workers = [await engines.mock(nursery, name, logs, ("--tick", TICK)) for name in ("worker-0", "worker-1")]
        relay = await engines.relay(nursery, [worker.url for worker in workers], logs)
        for server in (relay, *workers):
            console.print(f"{server.name} on {server.url}")
        records = await _play(relay.url, workers, console)
        async with client() as http:
            migrations = int(total(await metrics(http, relay.url), "dyn_relay_migrations_total"))
        nursery.cancel_scope.cancel()
    return _verdict(records, migrations, relay.child.log, console)


async def _play(relay: str, workers: list[engines.Server], console: Console) -> dict[str, Record]:
    """Send both requests, kill the stream's worker, wait for both answers."""
    watch = Watch()
    records: dict[str, Record] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, console=console) as progress:

        async def request(key: str) -> None:
            records[key] = await send(http, relay, PLANS[key], watch)

        async with client() as http, trio.open_nursery() as nursery:
            bar = progress.add_task("", total=TOKENS)
            nursery.start_soon(request, STREAM)
            await watch.until(_reached(1))
            first = await busiest(relay, workers)
            [second] = [worker for worker in workers if worker is not first]
            nursery.start_soon(request, UNARY)
            await _follow(watch, progress, bar, first.name, DEATH)
            first.kill()
            progress.print(
                f"[bold red]kill -9[/] {first.name} (process {first.child.pid}) at token {watch.tokens[STREAM]}"
            )
            await _follow(watch, progress, bar, second.name, TOKENS)
    return records


async def _follow(watch: Watch, progress: Progress, bar: TaskID, worker: str, until: int) -> None:
    """Move the bar from event to event, until so many tokens have come or the stream has ended."""
    seen = watch.tokens.get(STREAM, 0)
    while seen < until and STREAM not in watch.ended:
        progress.update(bar, description=f"SSE stream, from {worker}", completed=seen)
        await watch.until(_reached(seen + 1))
        seen = watch.tokens.get(STREAM, 0)
    progress.update(bar, completed=seen)


def _reached(tokens: int) -> Any:
    return lambda watch: watch.tokens.get(STREAM, 0) >= tokens or STREAM in watch.ended


def _verdict(records: dict[str, Record], migrations: int, log: Path, console: Console) -> bool:
    problems = [f"{key}: {problem}" for key, record in records.items() for problem in verify(record)]
    if not migrations:
        problems.append("nothing was migrated")
    if problems:
        for problem in problems:
            console.print(f"[red]{problem[:300]}[/]", highlight=False)
        console.print(log.read_text()[-2000:], markup=False, highlight=False)
        console.print("[bold red]FAILED[/]: the answers are not the uninterrupted ones")
        return False
    console.print(
        "[bold green]VERIFIED[/]: all tokens, logprobs and counters equal the oracle's, in the stream that lost\n"
        "its worker and in the unary answer beside it.",
        soft_wrap=True,
    )
    return True


def verify(record: Record) -> Iterator[str]:
    """In which ways a record is not the oracle's answer to its own body."""
    try:
        answer = fold.answer(record)
    except fold.Incomplete as error:
        yield str(error)
        return
    yield from answer.defects
    yield from (f"outside the events: {line!r}" for line in record.stray)
    wanted = Oracle(Model()).answer(record.body)
    if any(meta["id"] != record.body["rid"] for meta in answer.metas):
        yield "an event under another id"
    yield from differences({**answer.events[-1], "output_ids": answer.ids, "meta_info": answer.meta}, wanted)
