"""Cases that qualify the proxy against stock SGLang 0.5.23, and the driver that runs them.

Each case starts the engines it needs, sends a load through the proxy, does to an engine what the case is named after,
and checks every answer against the same engine's uninterrupted one: token ids equal, logprobs within the tolerance that
`baseline` measures without any proxy, counters and budgets exact, no error seen by a client.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import click
import msgspec
import trio
from direct import direct
from judging import judge, keep, strike_during
from kv import kv_events
from lab import FLAVOURS, Lab, flush
from pairs import pairs
from rich.console import Console
from sidecars import sidecars

from dyn_chaos import load, report
from dyn_chaos.engines import TOLERANCE, Server, StockServer
from dyn_chaos.load import Plan
from dyn_chaos.report import Outcome
from dyn_chaos.verdict import widest
from dyn_testkit import checkers, fold, history
from dyn_testkit.checkers.logprobs import widest_difference
from dyn_testkit.history import Record
from dyn_testkit.watch import Watch, started

STREAMS = 16
KILLS = 20
TOKENS = 256
#: Every SSE stream of the load has begun; its unary ones were sent with it.
BEGUN = STREAMS // 2

#: Fast enough to see a silent engine within a case; probes often, so that a drained engine is noticed.
SILENCE = ("--stall-timeout-secs", "8", "--health-check-timeout-secs", "4")
PROBES = ("--health-check-interval-secs", "1", "--health-failure-threshold", "2")

#: The HTTP process answers this path from memory, whatever has become of the engine behind it.
LYING = (*SILENCE, "--health-check-endpoint", "/model_info")

Strike = Callable[[StockServer], Awaitable[None]]


async def baseline(lab: Lab, outcome: Outcome) -> None:
    """No proxy: how far do two uninterrupted runs differ, and a run and its continuation made by hand?"""
    _, b = await lab.engines("ab")
    references = await lab.references(_plans(lab))
    outcome.facts["widest"] = 0.0
    for cut in (1, 2, 50, 128, TOKENS - 1):
        rests = [_by_hand(reference, cut) for reference in references.values()]
        # Beside the continuations, the same requests from the start: batches are as mixed as after a real death.
        answers = await load.send_all(b.url, [*rests, *_load(lab, f"beside-{cut}")])
        whole = {key: answers[key] for key in references}
        outcome.findings += checkers.check(history.of_records(whole, references, TOLERANCE))
        equal, apart = 0, widest(whole, references)
        for key, reference in references.items():
            want, got = fold.answer(reference), fold.answer(answers[f"rest-{key}"])
            equal += got.ids == want.ids[cut:]
            apart = max(apart, widest_difference(_output(got, 0), _output(want, cut)))
        outcome.facts[f"continued at {cut}"] = f"{equal}/{len(references)} equal, logprobs within {apart:.1e}"
        outcome.facts["widest"] = max(outcome.facts["widest"], apart)
        outcome.expect(equal == len(references), "tokens", f"{equal} of {len(references)} continued at {cut} are equal")
        outcome.expect(apart <= TOLERANCE, "tolerance", f"{apart:.1e} at {cut}")
        await flush(b.url)


def _output(answer: fold.Answer, cut: int) -> fold.Answer:
    """An answer's tokens after `cut`, without the prompt's logprobs."""
    meta = {name: answer.meta[name][cut:] for name in fold.PER_TOKEN if name in answer.meta}
    return dataclasses.replace(answer, ids=answer.ids[cut:], meta=meta)


def _by_hand(reference: Record, cut: int) -> Plan:
    """The request that goes on after `cut` tokens of a complete answer."""
    body = {**reference.body, "stream": False, "logprob_start_len": -1, "rid": None}
    body["input_ids"] = body["input_ids"] + fold.answer(reference).ids[:cut]
    body["sampling_params"] = {**body["sampling_params"], "max_new_tokens": TOKENS - cut}
    return Plan(f"rest-{reference.key}", body)


async def untouched(lab: Lab, outcome: Outcome) -> None:
    """Through the proxy, nothing killed: answers are the engine's, and nothing was migrated."""
    engines = await lab.engines("ab")
    references = await lab.references(_plans(lab))
    async with trio.open_nursery() as nursery:
        relay = await lab.relay(nursery, engines, "untouched", ())
        records = await load.send_all(relay.url, _load(lab, "untouched"))
        keep(lab, "untouched", records)
        await judge(relay, records, references, outcome, moves=False)
        nursery.cancel_scope.cancel()


async def _death(
    lab: Lab, outcome: Outcome, *, name: str, strike: Strike, flags: tuple[str, ...] = (), at: int = 1
) -> None:
    """The busier one of two engines is struck once every SSE stream has `at` tokens."""
    engines = await lab.engines("ab")
    references = await lab.references(_plans(lab))
    async with trio.open_nursery() as nursery:
        relay = await lab.relay(nursery, engines, name, flags)
        victim: list[StockServer] = []

        async def strike_the_busiest() -> None:
            victim.append(await lab.busiest(relay, engines))
            await strike(victim[0])

        records = await strike_during(relay.url, _load(lab, name), started(BEGUN, at), strike_the_busiest, outcome)
        keep(lab, name, records)
        await judge(relay, records, references, outcome)
        rows = _read_trace(lab, name, STREAMS, outcome)
        modes = {row["streaming"] for row in rows if len(row["attempts"]) > 1}
        outcome.expect(modes == {True, False}, "vacuous", "the strike did not move both a stream and a unary request")
        nursery.cancel_scope.cancel()
    for engine in victim:
        await lab.discard("ab"[engines.index(engine)])


async def _kill_group(engine: StockServer) -> None:
    engine.kill()


async def _kill_scheduler(engine: StockServer) -> None:
    os.kill(engine.scheduler, signal.SIGKILL)


async def _kill_detokenizer(engine: StockServer) -> None:
    os.kill(engine.detokenizer, signal.SIGKILL)


async def _stop_scheduler(engine: StockServer) -> None:
    os.kill(engine.scheduler, signal.SIGSTOP)


async def kill_twice(lab: Lab, outcome: Outcome) -> None:
    """Three engines; the busiest is killed, and soon after its streams have moved, the busier of the others."""
    engines = await lab.engines("abc")
    references = await lab.references(_plans(lab))
    async with trio.open_nursery() as nursery:
        relay = await lab.relay(nursery, engines, "kill-twice", ())
        watch = Watch()
        victims: list[StockServer] = []

        async def kill_two() -> None:
            victims.append(await lab.busiest(relay, engines))
            victims[0].kill()
            await _until_migrating(relay.url)
            progress = sum(watch.tokens.values()) + 8 * BEGUN
            await watch.until(lambda seen: sum(seen.tokens.values()) >= progress or len(seen.ended) == STREAMS)
            victims.append(await lab.busiest(relay, [engine for engine in engines if engine not in victims]))
            victims[1].kill()

        records = await strike_during(relay.url, _load(lab, "kill-twice"), started(1, 20), kill_two, outcome, watch)
        keep(lab, "kill-twice", records)
        await judge(relay, records, references, outcome)
        rows = _read_trace(lab, "kill-twice", STREAMS, outcome)
        outcome.facts["moved twice"] = sum(len(row["attempts"]) > 2 for row in rows)
        outcome.expect(outcome.facts["moved twice"] != 0, "vacuous", "nothing moved twice")
        nursery.cancel_scope.cancel()
    for engine in victims:
        await lab.discard("abc"[engines.index(engine)])


async def drain(lab: Lab, outcome: Outcome) -> None:
    """SIGTERM of one engine's HTTP process: its streams finish there, new requests go to the other one."""
    engines = await lab.engines("ab")
    references = await lab.references(_plans(lab))
    async with trio.open_nursery() as nursery:
        relay = await lab.relay(nursery, engines, "drain", PROBES)
        late: dict[str, Record] = {}
        draining: list[StockServer] = []

        async def terminate_and_send_more() -> None:
            draining.append(await lab.busiest(relay, engines))
            draining[0].child.send(signal.SIGTERM)
            await _until_unhealthy(relay.url, lab.address(draining[0]))
            late.update(await load.send_all(relay.url, [load.renamed(plan, "late") for plan in _plans(lab)[:4]]))

        records = await strike_during(relay.url, _load(lab, "drain"), started(BEGUN), terminate_and_send_more, outcome)
        keep(lab, "drain", records | late)
        wanted = references | {f"late-{plan.key}": references[plan.key] for plan in _plans(lab)[:4]}
        await judge(relay, records | late, wanted, outcome, moves=None)
        rows = _read_trace(lab, "drain", len(wanted), outcome)
        elsewhere = [row for row in rows if row["attempts"][0]["url"] != lab.address(draining[0])]
        outcome.facts["migrations while draining"] = outcome.facts.pop("migrations")
        outcome.facts["rows not on the draining engine"] = len(elsewhere)
        outcome.expect(len(elsewhere) >= 4, "drain", "a request that came after the drain began went to that engine")
        nursery.cancel_scope.cancel()
    await lab.discard("ab"[engines.index(draining[0])])


async def poison(lab: Lab, outcome: Outcome) -> None:
    """One request with a token id outside the vocabulary, before four engines: at most two may die of it."""
    engines = await lab.engines("abcd")
    references = await lab.references(_plans(lab))
    deadly = Plan("poison", {"input_ids": [5, 6, 5000], "sampling_params": {"temperature": 0, "max_new_tokens": 8}})
    async with trio.open_nursery() as nursery:
        relay = await lab.relay(nursery, engines, "poison", ())
        answers: list[Record] = []

        async def send_poison() -> None:
            for _ in range(2):
                answers.extend((await load.send_all(relay.url, [deadly])).values())

        records = await strike_during(relay.url, _load(lab, "poison"), started(BEGUN), send_poison, outcome)
        kept = {f"poison-{i}": msgspec.structs.replace(answer, key=f"poison-{i}") for i, answer in enumerate(answers)}
        keep(lab, "poison", records | kept)
        await judge(relay, records, references, outcome)
        await trio.sleep(8)  # an engine needs 5 s to die of its scheduler
        dead = [letter for letter, engine in zip("abcd", engines, strict=True) if not engine.child.alive]
        outcome.facts["engines dead"] = len(dead)
        outcome.expect(1 <= len(dead) <= 2, "poison", f"{len(dead)} engines died")
        for number, answer in enumerate(answers):
            said = f"{answer.status} after {answer.ended - answer.sent:.1f} s: {answer.text[:160]}"
            outcome.expect(
                answer.status == 502 and "suspected_poison" in answer.text, "poison", said, f"poison-{number}"
            )
        if len(answers) == 2:
            again = answers[1].ended - answers[1].sent
            outcome.facts["the retry's answer"] = f"{answers[1].status} in {again * 1e3:.0f} ms"
            outcome.expect(again < 1, "poison", f"the retry took {again:.1f} s")
        nursery.cancel_scope.cancel()
    for letter in dead:
        await lab.discard(letter)


async def twenty_kills(lab: Lab, outcome: Outcome) -> None:
    """The busier of two engines is killed, twenty times, each time somewhere else in the answers."""
    random, plans = Random(20), _plans(lab)
    moved = 0
    for number in range(KILLS):
        name = f"kill-{number}"
        engines = await lab.engines("ab")
        references = await lab.references(plans)
        tokens = sum(len(fold.answer(record).ids) for record in references.values() if record.streaming)
        point = random.randrange(1, tokens * 3 // 4)
        async with trio.open_nursery() as nursery:
            relay = await lab.relay(nursery, engines, name, ())
            victim: list[StockServer] = []

            async def strike(relay: Server, engines: list[StockServer], victim: list[StockServer]) -> None:
                victim.append(await lab.busiest(relay, engines))
                victim[0].kill()

            ready = partial(_told, point)
            kill = partial(strike, relay, engines, victim)
            records = await strike_during(relay.url, _load(lab, name), ready, kill, outcome)
            keep(lab, name, records)
            await judge(relay, records, references, outcome, moves=None)
            moved += outcome.facts.pop("migrations")
            _read_trace(lab, name, STREAMS, outcome)
            nursery.cancel_scope.cancel()
        for engine in victim:
            await lab.discard("ab"[engines.index(engine)])
        outcome.facts["kills"] = number + 1
    outcome.facts["migrations"] = moved
    outcome.expect(moved >= KILLS, "vacuous", f"{moved} migrations in {KILLS} kills")


def _told(tokens: int, seen: Watch) -> bool:
    return sum(seen.tokens.values()) >= tokens


CASES: dict[str, Callable[[Lab, Outcome], Awaitable[None]]] = {
    "baseline": baseline,
    "untouched": untouched,
    "stop-scheduler": partial(_death, name="stop-scheduler", strike=_stop_scheduler, flags=SILENCE, at=60),
    "kill-detokenizer": partial(_death, name="kill-detokenizer", strike=_kill_detokenizer, flags=SILENCE),
    "lying-probe": partial(_death, name="lying-probe", strike=_stop_scheduler, flags=LYING, at=8),
    "kill-scheduler": partial(_death, name="kill-scheduler", strike=_kill_scheduler, at=30),
    "drain": drain,
    "kill-group": partial(_death, name="kill-group", strike=_kill_group),
    "kill-twice": kill_twice,
    "poison": poison,
    "kv-events": kv_events,
    "pairs": pairs,
    "direct": direct,
    "sidecars": sidecars,
    "twenty-kills": twenty_kills,
}

#: What runs when no case is named.
MATRIX = {
    "cumulative": tuple(name for name in CASES if name not in ("direct", "twenty-kills")),
    "incremental": ("baseline", "untouched", "kill-detokenizer", "kill-group", "kill-twice"),
    "experts": ("baseline", "kill-group"),
    "seeded": ("baseline", "kill-group"),
    "text": ("untouched", "twenty-kills"),
    "text-incremental": ("untouched", "twenty-kills"),
    "grpc": (
        *("direct", "untouched", "stop-scheduler", "kill-scheduler", "drain", "kill-group", "kill-twice"),
        *("pairs", "sidecars"),
    ),
    "grpc-incremental": ("direct", "untouched", "kill-group"),
    "grpc-text": ("direct", "untouched"),
    "grpc-text-incremental": ("direct", "kill-group"),
}


def _plans(lab: Lab) -> list[Plan]:
    return lab.plans(STREAMS, TOKENS)


def _load(lab: Lab, case: str) -> list[Plan]:
    """The load under rids that no other case uses; the same keys."""
    return [Plan(plan.key, load.renamed(plan, case).body) for plan in _plans(lab)]


async def _until_unhealthy(relay: str, url: str) -> None:
    async with load.client() as http:
        with trio.fail_after(30):
            while True:
                workers = (await http.get(f"{relay}/workers")).raise_for_status().json()["workers"]
                if not all(each["is_healthy"] for each in workers if each["url"].rstrip("/") == url):
                    return
                await trio.sleep(0.1)


async def _until_migrating(relay: str) -> None:
    async with load.client() as http:
        with trio.fail_after(30):
            while True:
                if load.total(await load.metrics(http, relay), "dyn_relay_migrations_total"):
                    return
                await trio.sleep(0.02)


def _read_trace(lab: Lab, name: str, requests: int, outcome: Outcome) -> list[dict[str, Any]]:
    """One row a request, no more and no less; how many needed more than one attempt."""
    rows = [json.loads(line) for line in lab.trace(name).read_text().splitlines()]
    moved = [row["streaming"] for row in rows if len(row["attempts"]) > 1]
    outcome.facts["moved"] = f"{sum(moved)} SSE and {len(moved) - sum(moved)} unary"
    outcome.expect(len(rows) == requests, "trace", f"{len(rows)} rows for {requests} requests")
    return rows


async def qualify(home: Path, wanted: Mapping[str, Sequence[str]]) -> list[Outcome]:
    """Run the wanted cases, flavour by flavour; a case that raises has failed."""
    logs = home / "logs"
    logs.mkdir(exist_ok=True)
    outcomes: list[Outcome] = []
    for flavour, names in wanted.items():
        async with trio.open_nursery() as nursery:
            lab = Lab.of(home, flavour, nursery)
            for name in names:
                outcome = Outcome(f"{name} ({flavour})")
                outcomes.append(outcome)
                began = trio.current_time()
                click.echo(f"      {outcome.name} ...")
                try:
                    await CASES[name](lab, outcome)
                except Exception as error:
                    outcome.expect(False, "crash", repr(error))
                    await lab.engines("")
                outcome.facts["took"] = f"{trio.current_time() - began:.0f} s"
                click.echo(report.line(outcome))
                report.save(home / "report.json", outcomes)
            await lab.engines("")
            nursery.cancel_scope.cancel()
    return outcomes


@click.command()
@click.option("--home", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--flavour", "flavours", multiple=True, type=click.Choice(list(FLAVOURS)), default=tuple(FLAVOURS))
@click.option("--list", "listing", is_flag=True, help="Name the cases and stop.")
@click.argument("names", nargs=-1, type=click.Choice(list(CASES)))
def main(home: Path, flavours: tuple[str, ...], listing: bool, names: tuple[str, ...]) -> None:
    """Qualify the proxy against stock SGLang; exits with 1 if any check fails."""
    if listing:
        click.echo("\n".join(CASES))
        return
    outcomes = trio.run(qualify, home, {flavour: names or MATRIX[flavour] for flavour in flavours})
    report.show(outcomes, Console(width=160))
    sys.exit(not all(outcome.ok for outcome in outcomes))


if __name__ == "__main__":
    main()
