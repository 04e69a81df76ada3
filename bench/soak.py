"""2,000 slow streams for a minute over workers that cut some of them: `python bench/soak.py`.

Each cut stream must go on elsewhere; every token is checked. Afterwards nothing may be left: the in-flight gauges are
at zero and the file descriptors are where they were. Exits with 1 and says which check failed.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack

import procs
from peers import PEERS
from procs import LOAD_CORE, PROXY_CORE, Cost, cost
from report import Sample

STEP_US = 250_000
SETTLE_SECS = 30  # pooled connections and probes are gone by then
GAUGES = ("dyn_relay_requests_in_flight", "dyn_relay_attempts_in_flight")


def soak(options: argparse.Namespace) -> Sample:
    """Run it; gives what was seen."""
    port, *worker_ports = procs.free_ports(options.workers + 1)
    pace = ["--step-us", str(STEP_US), "--mode", options.mode]
    with ExitStack() as stack:
        for number, worker_port in enumerate(worker_ports):
            kills = ["--kill-share", str(options.kill_share), "--seed", str(options.seed + number)]
            command = procs.worker_command(worker_port, pace + kills)
            stack.enter_context(procs.running(command, LOAD_CORE, f"soak-worker{number}"))
        command = PEERS["dyn-relay"].command(port, worker_ports)
        proxy = stack.enter_context(procs.running(command, PROXY_CORE, "soak-proxy"))
        procs.wait_until_serving(port)
        before = settled(proxy, port, None)
        peak = before

        def sample() -> None:
            nonlocal peak
            peak = max(peak, cost(proxy), key=lambda seen: seen.rss)

        streams = str(options.streams)
        load = ["--conns", streams, "--requests", streams, "--ramp-ms", "4000", "--timeout-s", "300"]
        result = procs.load(port, "soak", load, sample)
        after = settled(proxy, port, before)
        migrations = procs.metric(port, "dyn_relay_migrations_total")
        gauges = {name: procs.metric(port, name) for name in GAUGES}
        stats = [procs.mock_stats(worker_port) for worker_port in worker_ports]
    return {
        "load": result.report,
        "cut": sum(stat["cut"] for stat in stats),
        "attempts": sum(stat["requests"] for stat in stats),
        "migrations": migrations,
        "gauges": gauges,
        "fds": [before.fds, peak.fds, after.fds],
        "rss_mb": [before.rss / 1e6, peak.rss / 1e6, after.rss / 1e6],
        "kb_per_stream": (peak.rss - before.rss) / options.streams / 1000,
        "cpu_ms_per_stream": (after.run_ms - before.run_ms) / options.streams,
    }


def settled(proxy: int, port: int, before: Cost | None) -> Cost:
    """The proxy's cost once its connections of the past have gone, or when they had the time to go."""
    deadline = time.monotonic() + SETTLE_SECS
    while True:
        time.sleep(1)
        now = cost(proxy)
        idle = all(procs.metric(port, name) == 0 for name in GAUGES)
        if (idle and before is None) or (idle and before is not None and now.fds <= before.fds):
            return now
        if time.monotonic() > deadline:
            return now


def failures(seen: Sample, streams: int) -> list[str]:
    """What is not as it must be."""
    checks = {
        f"{streams} answers complete and right": seen["load"]["ok"] == streams and not seen["load"]["errors"],
        f"{streams} streams at once": seen["load"]["busy_max"] == streams,
        "some streams were cut": seen["cut"] > 0,
        "each cut led to one migration": seen["migrations"] == seen["cut"],
        "gauges back to zero": not any(seen["gauges"].values()),
        "file descriptors flat": seen["fds"][2] <= seen["fds"][0],
    }
    return [name for name, good in checks.items() if not good]


def main() -> None:
    """Run the soak, print what was seen as JSON, exit with 1 if it is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill-share", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=["incremental", "cumulative"], default="incremental")
    options = parser.parse_args()
    procs.require_build()
    seen = soak(options)
    print(json.dumps(seen, indent=1))
    failed = failures(seen, options.streams)
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
