"""Prefill/decode pairs of stock engines behind the proxy: two of each role, struck in every phase of a request.

The reference is one engine that is no pair. What an engine holds is asked of the engine itself: it empties its cache on
request only when nothing runs, waits, or is being transferred, and dies of memory that it cannot account for.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import click
import httpx
import trio
from judging import judge, keep, strike_during
from lab import FLAVOURS, Lab, busiest

from dyn_chaos import engines, load, report
from dyn_chaos.audit import listed
from dyn_chaos.engines import Server, StockServer
from dyn_chaos.load import Plan
from dyn_chaos.processes import free_port
from dyn_chaos.report import Outcome
from dyn_testkit.history import Record
from dyn_testkit.watch import started

STREAMS, TOKENS = 16, 400
#: Prompts that take an engine a tenth of a second, more while others are computed.
LONG, LONG_PROMPT = 8, 1500
#: Seconds after the sending in which the prompts of `LONG` requests are being computed.
WHILE_COMPUTING = 0.15
#: Requests that do not come to their end, the seconds in which that happens to them, how many at once.
STORM, WITHIN, AT_ONCE = 80, 0.25, 4
#: Seconds in which engines have to be free of what nobody waits for.
FREE = 5.0
SILENCE = ("--stall-timeout-secs", "8", "--health-check-timeout-secs", "4")


@dataclass
class Engine:
    """A stock engine of one role, always at the same ports."""

    lab: Lab
    role: str
    port: int = field(default_factory=free_port)
    bootstrap: int = field(default_factory=free_port)
    server: StockServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> StockServer:
        assert self.server is not None
        return self.server

    @property
    def address(self) -> str:
        """How the proxy reaches it."""
        return self.lab.address(self.running)

    async def start(self) -> None:
        stock = self.lab.stock
        flags = (*stock.flags, "--disaggregation-mode", self.role, "--disaggregation-transfer-backend", "mooncake_tcp")
        if self.role == "prefill":
            flags = (*flags, "--disaggregation-bootstrap-port", str(self.bootstrap))
        paired = replace(stock, flags=flags, env={**stock.env, "SHIM_IGNORE_PIN_MEMORY": "1"})
        self.server = await paired.start(self.lab.nursery, self.port, self.lab.logs)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop()
            self.server = None


@dataclass
class Pairs:
    """Two engines of each role, the loads, and what an undisturbed engine says to them."""

    lab: Lab
    prefills: list[Engine]
    decodes: list[Engine]
    plans: list[Plan]
    long: list[Plan]
    references: Mapping[str, Record]

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefills, *self.decodes]

    async def relay(self, nursery: trio.Nursery, part: str, flags: Sequence[str] = ()) -> Server:
        named = [each for one in self.prefills for each in ("--prefill", one.address, str(one.bootstrap))]
        named += [each for one in self.decodes for each in ("--decode", one.address)]
        name = f"relay-pairs-{part}-{self.lab.flavour}"
        return await engines.relay(nursery, [], self.lab.logs, ["--pd-disaggregation", *named, *flags], name)

    async def free(self, within: float = FREE) -> str:
        """Who still holds something after that time, or does not answer; "" if nobody."""
        busy = {engine.url: f"a {engine.role} engine" for engine in self.engines}
        with trio.move_on_after(within):
            async with load.client() as http:
                while busy:
                    for url in list(busy):
                        if (await http.post(f"{url}/flush_cache")).status_code == 200:
                            del busy[url]
                    await trio.sleep(0.05)
        return " and ".join(busy.values())


def named(plans: Sequence[Plan], part: str) -> list[Plan]:
    """Under rids that no other part uses; the same keys."""
    return [Plan(plan.key, load.renamed(plan, part).body) for plan in plans]


def of(records: Mapping[str, Record], plans: Sequence[Plan]) -> dict[str, Record]:
    return {plan.key: records[plan.key] for plan in plans}


# -- its parts ---------------------------------------------------------------------------------------------------------


async def untouched(w: Pairs, outcome: Outcome) -> None:
    """Nothing happens."""
    async with trio.open_nursery() as nursery:
        relay = await w.relay(nursery, "untouched")
        plans = [*w.plans, *w.long]
        records = await load.send_all(relay.url, named(plans, "untouched"))
        keep(w.lab, "pairs-untouched", records)
        await judge(relay, records, w.references, outcome, moves=False)
        nursery.cancel_scope.cancel()


async def storm(w: Pairs, outcome: Outcome) -> None:
    """Clients leave, or abort, at any moment of the first quarter of a second; others are served meanwhile."""
    random = Random(9)
    seen: Counter[str] = Counter()
    slowest = 0.0
    async with trio.open_nursery() as nursery:
        relay = await w.relay(nursery, "storm")
        gate = trio.Semaphore(AT_ONCE)

        async def one(http: httpx.AsyncClient, number: int) -> None:
            nonlocal slowest
            prompt = random.choices(range(4, 1024), k=random.randint(LONG_PROMPT - 300, LONG_PROMPT))
            streams, leaves, moment = number % 2 == 0, number % 4 < 2, random.uniform(0, WITHIN)
            body = {
                "input_ids": prompt,
                "rid": f"storm-{number}-{w.lab.flavour}",
                "stream": streams,
                "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
                **({"return_logprob": True, "logprob_start_len": 0} if number % 3 == 0 else {}),
            }
            async with gate:
                if leaves:
                    with trio.move_on_after(moment):
                        await http.post(f"{relay.url}/generate", json=body)
                        seen["came to its end"] += 1
                    return
                answers: list[httpx.Response] = []
                async with trio.open_nursery() as client:

                    async def ask() -> None:
                        answers.append(await http.post(f"{relay.url}/generate", json=body))

                    client.start_soon(ask)
                    await trio.sleep(moment)
                    told = trio.current_time()
                    while not answers:  # the first may overtake the request that it means
                        await http.post(f"{relay.url}/abort_request", json={"rid": body["rid"]})
                        await trio.sleep(0.2)
                slowest = max(slowest, trio.current_time() - told)
                said = ended(answers[0])
                seen[said] += 1
                outcome.expect(said == "abort", "abort", f"{said}: {answers[0].text[-300:]}", str(body["rid"]))

        async with load.client() as http, trio.open_nursery() as both:

            async def all_of_them() -> None:
                async with trio.open_nursery() as many:
                    for number in range(STORM):
                        many.start_soon(one, http, number)

            both.start_soon(all_of_them)
            records = await load.send_all(relay.url, named(w.plans, "beside"))
        began = trio.current_time()
        busy = await w.free()
        outcome.facts["requests that were left or aborted"] = STORM
        outcome.facts["free after"] = f"{trio.current_time() - began:.1f} s"
        outcome.facts["slowest answer to an abort"] = f"{slowest:.1f} s"
        outcome.expect(not busy, "slots", f"{busy} is not free within {FREE:g} s")
        after = await load.send_all(relay.url, named(w.plans, "after"))
        keep(w.lab, "pairs-storm", after)
        for got in (records, after):
            await judge(relay, got, of(w.references, w.plans), outcome, moves=False)
        outcome.facts["ended"] = dict(seen)
        nursery.cancel_scope.cancel()


def ended(answer: httpx.Response) -> str:
    """How an answer ends: the type of its finish reason, or its status."""
    text = answer.text
    for kind in ("abort", "length"):
        if f'"finish_reason":{{"type":"{kind}"' in text.replace(" ", ""):
            return kind if answer.status_code == 200 and '"status_code":500' not in text else f"{kind}, failed"
    return f"status {answer.status_code}"


async def trainers_abort(w: Pairs, outcome: Outcome) -> None:
    """A trainer tells the decode engines themselves to abort everything: nothing goes on anywhere."""
    seen: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        relay = await w.relay(nursery, "trainers-abort")
        async with load.client() as http:
            for round_, moment in enumerate((0.02, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)):
                answers: dict[str, httpx.Response] = {}

                async def ask(plan: Plan, answers: dict[str, httpx.Response]) -> None:
                    answers[plan.key] = await http.post(f"{relay.url}/generate", json=plan.body)

                async with trio.open_nursery() as clients:
                    for plan in named(w.long, f"trainer-{round_}"):
                        clients.start_soon(ask, plan, answers)
                    await trio.sleep(moment)
                    while len(answers) < LONG:
                        for engine in w.decodes:
                            await http.post(f"{engine.url}/abort_request", json={"abort_all": True})
                        await trio.sleep(0.2)
                for key, answer in answers.items():
                    said = ended(answer)
                    seen[said] += 1
                    outcome.expect(said in ("abort", "length"), "abort", f"{said}: {answer.text[-400:]}", key)
        rows = rows_of(w, "trainers-abort")
        again = [row for row in rows if len(row["attempts"]) > 1]
        outcome.facts["answers"] = dict(seen)
        outcome.expect(not again, "rescued", f"{len(again)} of {len(rows)}: {again[:1]}")
        busy = await w.free()
        outcome.expect(not busy, "slots", f"{busy} is not free")
        nursery.cancel_scope.cancel()


def rows_of(w: Pairs, part: str) -> list[dict[str, Any]]:
    """What the part's proxy has traced."""
    path = w.lab.logs / f"relay-pairs-{part}-{w.lab.flavour}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


async def struck(
    w: Pairs,
    outcome: Outcome,
    *,
    part: str,
    role: str,
    strike: Callable[[Server, Engine], Awaitable[None]],
    at: int,
    moves: bool | None,
    flags: Sequence[str] = (),
) -> Engine | None:
    """Strike the busier engine of a role once half of the streams have `at` tokens; 0: while prompts are computed."""
    plans = w.plans if at else w.long
    victims: list[Engine] = []
    async with trio.open_nursery() as nursery:
        relay = await w.relay(nursery, part, flags)

        async def strike_the_busiest() -> None:
            if not at:
                await trio.sleep(WHILE_COMPUTING)
            engines = w.prefills if role == "prefill" else w.decodes
            victims.append(await busiest(relay.url, {engine.address: engine for engine in engines}))
            await strike(relay, victims[0])

        streams = sum(bool(plan.body.get("stream")) for plan in plans)
        ready = started(streams // 2, at) if at else (lambda watch: True)
        records = await strike_during(relay.url, named(plans, part), ready, strike_the_busiest, outcome)
        keep(w.lab, f"pairs-{part}", records)
        await judge(relay, records, of(w.references, plans), outcome, moves=moves)
        nursery.cancel_scope.cancel()
    return victims[0] if victims else None


async def killed(w: Pairs, outcome: Outcome, **how: Any) -> str:
    """SIGKILL of everything; the others are free soon, and it comes back. Where it was; "" if nothing was struck."""

    async def kill(relay: Server, engine: Engine) -> None:
        engine.running.kill()

    victim = await struck(w, outcome, strike=kill, **how)
    if victim is None:
        return ""
    at = victim.address
    await victim.stop()
    await victim.start()
    busy = await w.free(15)
    outcome.expect(not busy, "slots", f"{busy} is not free after the death")
    return at


async def killed_late(w: Pairs, outcome: Outcome, part: str) -> None:
    """A prefill engine is killed: what it has handed over goes on where it is. On a busy machine some is not yet."""
    at = await killed(w, outcome, part=part, role="prefill", at=32, moves=None)
    rows = [row for row in rows_of(w, part) if row["attempts"][0]["prefill_url"] == at]
    over = [row for row in rows if row["attempts"][0]["first_token"] is not None]
    moved = [row for row in over if len(row["attempts"]) > 1]
    outcome.facts["handed over"] = f"{len(over)} of {len(rows)}"
    outcome.expect(bool(over), "vacuous", "nothing was handed over before the strike")
    outcome.expect(not moved, "migrations", f"{len(moved)} were handed over and moved: {moved[:1]}")


async def stopped(w: Pairs, outcome: Outcome, **how: Any) -> None:
    """SIGSTOP of the scheduler; after SIGCONT it holds nothing."""

    async def stop(relay: Server, engine: Engine) -> None:
        os.kill(engine.running.scheduler, signal.SIGSTOP)

    victim = await struck(w, outcome, strike=stop, flags=SILENCE, **how)
    if victim is None:
        return
    os.kill(victim.running.scheduler, signal.SIGCONT)
    busy = await w.free(15)
    outcome.expect(not busy, "slots", f"{busy} is not free after SIGCONT")


async def drained(w: Pairs, outcome: Outcome, **how: Any) -> None:
    """It is to be empty at once, by the proxy's own order."""

    async def drain(relay: Server, engine: Engine) -> None:
        async with load.client() as http:
            [worker] = [one for one in await listed(http, relay.url) if one["url"].rstrip("/") == engine.address]
            (await http.post(f"{relay.url}/workers/{worker['id']}/drain", params={"after": "0"})).raise_for_status()

    await struck(w, outcome, strike=drain, **how)
    busy = await w.free()
    outcome.expect(not busy, "slots", f"{busy} is not free after the drain")


PARTS: dict[str, Callable[[Pairs, Outcome], Awaitable[None]]] = {
    "untouched": untouched,
    "storm": storm,
    "trainers-abort": trainers_abort,
    "decode-drained": partial(drained, part="decode-drained", role="decode", at=8, moves=True),
    "decode-stopped": partial(stopped, part="decode-stopped", role="decode", at=8, moves=True),
    "prefill-stopped": partial(stopped, part="prefill-stopped", role="prefill", at=0, moves=True),
    "prefill-killed-late": partial(killed_late, part="prefill-killed-late"),
    "prefill-killed-early": partial(killed, part="prefill-killed-early", role="prefill", at=0, moves=True),
    "decode-killed": partial(killed, part="decode-killed", role="decode", at=8, moves=True),
    "decode-killed-early": partial(killed, part="decode-killed-early", role="decode", at=0, moves=True),
}


def _long(sampling: Mapping[str, Any]) -> list[Plan]:
    """Long prompts. `sampling` is the flavour's: a greedy request in the batch changes what a seeded one draws."""
    random = Random(5)
    made = []
    for number in range(LONG):
        body = {
            "input_ids": random.choices(range(4, 1024), k=LONG_PROMPT - 7 * number),
            "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True, **sampling},
            "return_logprob": True,
            **({"logprob_start_len": 0} if number % 4 == 0 else {}),
            "stream": number % 2 == 0,
        }
        made.append(Plan(f"long-{number}", body))
    return made


async def pairs(lab: Lab, outcome: Outcome) -> None:
    """Two prefill and two decode engines: left, aborted, drained, stopped and killed in every phase."""
    await lab.engines("a")
    plans, long = lab.plans(STREAMS, TOKENS), _long(FLAVOURS[lab.flavour].sampling)
    references = await lab.references([*plans, *long])
    await lab.engines("")  # memory for these four
    w = Pairs(
        lab,
        [Engine(lab, "prefill") for _ in range(2)],
        [Engine(lab, "decode") for _ in range(2)],
        *(plans, long, references),
    )
    wanted = os.environ.get("DYN_LIVE_PARTS", "").split() or PARTS
    try:
        for engine in w.engines:
            await engine.start()
        for name in wanted:
            part = Outcome(name)
            began = trio.current_time()
            try:
                await PARTS[name](w, part)
            except Exception as error:
                part.expect(False, "crash", repr(error))
                break
            finally:
                part.facts["took"] = f"{trio.current_time() - began:.0f} s"
                click.echo("  " + report.line(part))
                outcome.findings += [replace(finding, key=f"{name}: {finding.key}") for finding in part.findings]
                outcome.facts[name] = ", ".join(f"{what} {fact}" for what, fact in part.facts.items())
    finally:
        with trio.CancelScope(shield=True):
            for engine in w.engines:
                await engine.stop()
