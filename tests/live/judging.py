"""Strike during a load, and judge what its clients got."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio
from lab import Lab

from dyn_chaos import load, sampler
from dyn_chaos.engines import TOLERANCE, Server
from dyn_chaos.load import Plan
from dyn_chaos.report import Outcome
from dyn_chaos.verdict import MOVES, verdict
from dyn_testkit import history
from dyn_testkit.history import End, History, Record, Run
from dyn_testkit.watch import Watch

#: The proxy says here whether it would rescue a request.
MIGRATABLE = "x-dyn-relay-migratable"


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
        records = await load.send_all(relay, plans, watch)
        if not struck:
            nursery.cancel_scope.cancel()
    outcome.expect(struck, "vacuous", "the load ended before the strike")
    return records


async def judge(
    relay: Server,
    records: Mapping[str, Record],
    references: Mapping[str, Record],
    outcome: Outcome,
    moves: bool | None = True,
) -> None:
    """Check every record, that the proxy holds nothing any more, and that it migrated something if it had to."""
    async with load.client() as http:
        last = await sampler.settled(http, relay.url, relay.child.pid, 0.0)
    run = Run(tolerance=TOLERANCE, settings={MOVES: moves})
    judged = verdict(History(run, dict(records), dict(references), samples=[last], end=End()))
    outcome.findings += judged.findings
    outcome.facts |= judged.facts
    for record in records.values():
        said = record.headers.get(MIGRATABLE)
        outcome.expect(said == "yes", "header", f"{MIGRATABLE}: {said}", record.key)


def keep(lab: Lab, name: str, records: Mapping[str, Record]) -> None:
    """Write what was answered beside the logs."""
    history.save(lab.logs / f"history-{name}-{lab.flavour}.jsonl", history.of_records(dict(records), {}).entries())
