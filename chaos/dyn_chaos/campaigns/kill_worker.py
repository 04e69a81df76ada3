"""Send a load through the proxy, strike one worker once enough streams have started, check every answer.

"Enough" is counted in events that clients have seen, never in time. The strike is any coroutine: a SIGKILL, a SIGSTOP,
a poisonous request. A run in which nothing was struck, or nothing had to move, fails: it has shown nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import trio

from dyn_chaos import engines
from dyn_chaos.engines import TOLERANCE, Victim
from dyn_chaos.load import Plan, ask_references, client, metrics, send_all, total
from dyn_chaos.report import Outcome
from dyn_testkit import checkers, fold, history
from dyn_testkit.checkers.logprobs import widest_difference
from dyn_testkit.history import Record
from dyn_testkit.watch import Watch, started

#: The proxy says here whether it would rescue a request.
MIGRATABLE = "x-dyn-relay-migratable"

#: Gauges of the proxy that count work in hand; zero when all clients have their answers.
GAUGES = ("dyn_relay_requests_in_flight", "dyn_relay_attempts_in_flight")

#: Seconds in which the proxy has to have tidied up after the last answer.
SETTLE = 5.0

V = TypeVar("V", bound=Victim)


async def strike_during(
    relay: str,
    plans: Sequence[Plan],
    ready: Callable[[Watch], bool],
    strike: Callable[[], Awaitable[None]],
    outcome: Outcome,
    watch: Watch | None = None,
) -> dict[str, Record]:
    """Run the load, `strike` once `ready` holds, wait for both. If the load ends before `ready`, that is a finding."""
    watch = watch or Watch()
    struck = False

    async def wait_and_strike() -> None:
        nonlocal struck
        await watch.until(ready)
        struck = True
        outcome.facts["tokens at the strike"] = sum(watch.tokens.values())
        outcome.facts["ended before it"] = len(watch.ended)
        await strike()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_and_strike)
        records = await send_all(relay, plans, watch)
        if not struck:
            nursery.cancel_scope.cancel()
    outcome.expect(struck, "vacuous", "the load ended before the strike")
    return records


async def judge(
    relay: str, records: Mapping[str, Record], references: Mapping[str, Record], outcome: Outcome, moved: bool = True
) -> None:
    """Check every record, that the proxy holds nothing any more, and, if `moved`, that it did migrate something."""
    outcome.findings += checkers.check(history.of_records(records, references, TOLERANCE))
    for record in records.values():
        said = record.headers.get(MIGRATABLE)
        outcome.expect(said == "yes", "header", f"{MIGRATABLE}: {said}", record.key)
    good = records.keys() - {finding.key for finding in outcome.findings}
    outcome.facts["answers"] = f"{len(good)}/{len(records)}"
    outcome.facts["widest logprob difference"] = widest(records, references)
    outcome.facts["slowest answer"] = f"{longest_answer(records):.1f} s"
    async with client() as http:
        samples = await settle(http, relay)
    for gauge in GAUGES:
        outcome.expect(gauge in samples and samples[gauge] == 0, "leak", f"{gauge} {samples.get(gauge)}")
    migrations = total(samples, "dyn_relay_migrations_total")
    outcome.facts["migrations"] = int(migrations)
    outcome.expect(not moved or migrations > 0, "vacuous", "nothing was migrated")


async def settle(http: httpx.AsyncClient, relay: str) -> Mapping[str, float]:
    """The proxy's metrics once its gauges are zero, or as they are after `SETTLE` seconds."""
    deadline = trio.current_time() + SETTLE
    while True:
        samples = await metrics(http, relay)
        if not any(samples.get(gauge) for gauge in GAUGES) or trio.current_time() > deadline:
            return samples
        await trio.sleep(0.05)


async def busiest(relay: str, servers: Sequence[V]) -> V:
    """The server with the most requests, as the proxy counts them. Raises `LookupError` if it lists none of them."""
    async with client() as http:
        listed = (await http.get(f"{relay}/workers")).raise_for_status().json()["workers"]
    loads = {entry["url"].rstrip("/"): entry["load"] for entry in listed}
    known = [server for server in servers if server.url in loads]
    if not known:
        raise LookupError(f"the proxy lists {sorted(loads)}")
    return max(known, key=lambda server: loads[server.url])


def widest(records: Mapping[str, Record], references: Mapping[str, Record]) -> float:
    """The largest logprob difference of all complete answers with their references."""
    found = 0.0
    for key in records.keys() & references.keys():
        try:
            found = max(found, widest_difference(fold.answer(records[key]), fold.answer(references[key])))
        except fold.Incomplete:
            continue
    return found


def longest_answer(records: Mapping[str, Record]) -> float:
    """Seconds from a request to the end of its answer, the longest of all."""
    return max((record.ended - record.sent for record in records.values()), default=0.0)


async def kill_worker(
    nursery: trio.Nursery,
    workers: Sequence[Victim],
    plans: Sequence[Plan],
    logs: Path,
    *,
    after: int,
    tokens: int = 1,
    flags: Sequence[str] = (),
) -> Outcome:
    """The whole campaign on workers that may be killed: references, proxy, load, SIGKILL of the busiest, checks.

    The kill comes once `after` streams have `tokens` tokens. `logs` gets the histories, the proxy's log and its trace.
    """
    outcome = Outcome("kill-worker")
    references = await ask_references(workers[0].url, plans)
    relay = await engines.relay(nursery, [worker.url for worker in workers], logs, flags)

    async def kill_the_busiest() -> None:
        victim = await busiest(relay.url, workers)
        outcome.facts["killed"] = victim.name
        victim.kill()

    records = await strike_during(relay.url, plans, started(after, tokens), kill_the_busiest, outcome)
    history.save(logs / "history.jsonl", history.of_records(records, references, TOLERANCE).entries())
    await judge(relay.url, records, references, outcome)
    return outcome
