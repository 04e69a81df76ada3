"""Campaigns on stock engines with a sidecar beside each: the sidecar is struck, or the engine behind it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import trio
from lab import Lab

from dyn_chaos.engines import script
from dyn_chaos.report import Outcome
from dyn_chaos.run import SUMMARY
from dyn_testkit.checkers import Finding

#: The last one ends an engine.
CAMPAIGNS = ("kill-sidecar", "stall-sidecar", "stall-engine", "kill-engine")
STREAMS, TOKENS, BEGUN = 16, 256, 8
#: Engines that share two cores are slower than mock workers, and a stall outlasts the proxy's patience.
PATIENCE = "--stall-timeout-secs 8 --first-token-timeout-secs 30 --health-check-timeout-secs 4"
STALL = ("--relay-flag", PATIENCE, "--duration", "20s")


async def sidecars(lab: Lab, outcome: Outcome) -> None:
    """A proxy that knows two engines from their sidecars alone; one of the four is killed or stopped."""
    engines = await lab.engines("ab")
    for name in CAMPAIGNS:
        out = lab.logs / f"{name}-{lab.flavour}"
        argv = [script("dyn-chaos"), name, "--streams", str(STREAMS), "--tokens", str(TOKENS)]
        argv += ["--after-streams", str(BEGUN), "--out", str(out)]
        argv += STALL if name.startswith("stall") else ()
        for engine in engines:
            argv += ["--attach", engine.url, "--pid", str(engine.child.pid)]
        done = await trio.run_process(argv, check=False, capture_stdout=True, stderr=subprocess.STDOUT)
        said: list[dict[str, Any]] = json.loads((out / SUMMARY).read_text())["outcomes"] if out.exists() else []
        for each in said:
            outcome.facts[name] = ", ".join(f"{what} {fact}" for what, fact in each["facts"].items())
            found = (Finding(f"{name}: {one['key']}", one["check"], one["message"]) for one in each["findings"])
            outcome.findings += found
        outcome.expect(done.returncode == 0, "exit", f"{name}: {done.returncode}: {done.stdout.decode()[-400:]}")
    for letter, engine in zip("ab", engines, strict=True):
        if not engine.child.alive:
            await lab.discard(letter)
