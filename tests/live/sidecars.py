"""Campaigns on stock engines with a sidecar beside each: the sidecar is struck, or the engine behind it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import trio
from judging import judge, keep, strike_during
from lab import FLAVOURS, Lab, busiest

from dyn_chaos import engines, load
from dyn_chaos.audit import states
from dyn_chaos.engines import script
from dyn_chaos.load import Plan
from dyn_chaos.report import Outcome
from dyn_chaos.run import SUMMARY
from dyn_testkit.checkers import Finding
from dyn_testkit.watch import started

#: The last one ends an engine.
CAMPAIGNS = ("kill-sidecar", "stall-sidecar", "stall-engine", "kill-engine")
STREAMS, TOKENS, BEGUN = 16, 256, 8
#: Engines that share two cores are slower than mock workers, and a stall outlasts the proxy's patience.
PATIENCE = "--stall-timeout-secs 8 --first-token-timeout-secs 30 --health-check-timeout-secs 4"
STALL = ("--relay-flag", PATIENCE, "--duration", "20s")


async def sidecars(lab: Lab, outcome: Outcome) -> None:
    """A proxy that knows two engines from their sidecars alone; one of the four is killed or stopped."""
    if FLAVOURS[lab.flavour].grpc:
        await _before_grpc(lab, outcome)
        return
    running = await lab.engines("ab")
    for name in CAMPAIGNS:
        out = lab.logs / f"{name}-{lab.flavour}"
        argv = [script("dyn-chaos"), name, "--streams", str(STREAMS), "--tokens", str(TOKENS)]
        argv += ["--after-streams", str(BEGUN), "--out", str(out)]
        argv += STALL if name.startswith("stall") else ()
        for engine in running:
            argv += ["--attach", engine.url, "--pid", str(engine.child.pid)]
        done = await trio.run_process(argv, check=False, capture_stdout=True, stderr=subprocess.STDOUT)
        said: list[dict[str, Any]] = json.loads((out / SUMMARY).read_text())["outcomes"] if out.exists() else []
        for each in said:
            outcome.facts[name] = ", ".join(f"{what} {fact}" for what, fact in each["facts"].items())
            found = (Finding(f"{name}: {one['key']}", one["check"], one["message"]) for one in each["findings"])
            outcome.findings += found
        outcome.expect(done.returncode == 0, "exit", f"{name}: {done.returncode}: {done.stdout.decode()[-400:]}")
    for letter, engine in zip("ab", running, strict=True):
        if not engine.child.alive:
            await lab.discard(letter)


async def _before_grpc(lab: Lab, outcome: Outcome) -> None:
    """Sidecars that reach their engines by gRPC: the busier one is killed."""
    running = await lab.engines("ab")
    plans = lab.plans(STREAMS, TOKENS)
    references = await lab.references(plans)
    async with trio.open_nursery() as nursery:
        relay = await engines.relay(nursery, [], lab.logs, (), f"relay-sidecars-{lab.flavour}")
        beside = []
        for number, engine in enumerate(running):
            argv = [script("dyn-sidecar"), "--engine-grpc", engine.grpc.removeprefix("grpc://"), "--relay", relay.url]
            beside.append(await engines.listen(nursery, f"sidecar-{number}-{lab.flavour}", argv, lab.logs))
        await registered(relay.url, {each.url for each in beside})

        async def kill_the_busiest() -> None:
            (await busiest(relay.url, {each.url: each for each in beside})).kill()

        load_ = [Plan(plan.key, load.renamed(plan, "sidecars").body) for plan in plans]
        records = await strike_during(relay.url, load_, started(BEGUN, 1), kill_the_busiest, outcome)
        keep(lab, "sidecars", records)
        await judge(relay, records, references, outcome)
        nursery.cancel_scope.cancel()


async def registered(relay: str, urls: set[str]) -> None:
    """The proxy uses them all."""
    async with load.client() as http:
        with trio.fail_after(60):
            while {url for url, state in (await states(http, relay)).items() if state == "ready"} != urls:  # noqa: ASYNC110
                await trio.sleep(0.1)
