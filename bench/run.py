"""Measure proxies against each other: `python bench/run.py --peers dyn-relay,sglang-router --workloads A,B --reps 3`.

The proxy runs on core 0, mock worker and load generator on core 1. In each repetition all peers take their turn, so
that noise meets them alike; ratios are taken within a repetition. Every token of every answer is checked. With
`--unpinned` each may use both cores: what two processes of a proxy are good for, though the load shares the cores then.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import procs
from peers import BASELINE, PEERS, Peer
from procs import LOAD_CORE, PROXY_CORE, Cost, core_busy_ms, cost
from report import Sample, report
from workloads import Workload, select


def why_absent(peer: Peer) -> str | None:
    """Why a peer cannot be measured here: it is not there, or does not serve. None: it can."""
    worker_port, port = procs.free_ports(2)
    try:
        command = peer.command(port, [worker_port])
        with (
            procs.running(procs.worker_command(worker_port, []), LOAD_CORE, f"{peer.name}-worker"),
            procs.running(command, PROXY_CORE, peer.name),
        ):
            procs.wait_until_serving(port, 30)
    except OSError as exc:
        return " ".join(str(exc).split())
    return None


def present(names: list[str]) -> Iterator[Peer]:
    """The peers of these names; one that we can do without and that is not here is skipped with a line."""
    for name in names:
        peer = PEERS[name]
        reason = None if peer.required else why_absent(peer)
        if reason is None:
            yield peer
        else:
            print(f"{name} is skipped: {reason}", file=sys.stderr, flush=True)


def measure(peer: Peer, workload: Workload, rep: int, pinned: bool = True) -> Sample:
    """One repetition, with a new worker and a new proxy."""
    worker_port, port = procs.free_ports(2)
    name = f"{workload.name}-{peer.name}"
    proxy_core, load_core = (PROXY_CORE, LOAD_CORE) if pinned else (None, None)
    with (
        procs.running(procs.worker_command(worker_port, list(workload.worker)), load_core, f"{name}-worker") as worker,
        procs.running(peer.command(port, [worker_port]), proxy_core, name) as proxy,
    ):
        procs.wait_until_serving(port)
        procs.load(port, *workload.warm, core=load_core)
        idle = cost(proxy)
        peak = idle

        def sample() -> None:
            nonlocal peak
            peak = max(peak, cost(proxy), key=lambda seen: seen.rss)

        begin, worker_begin = cost(proxy), cost(worker)
        busy_begin = core_busy_ms(PROXY_CORE) + core_busy_ms(LOAD_CORE)
        started = time.monotonic()
        result = procs.load(port, workload.body, workload.load, sample, load_core)
        seconds = time.monotonic() - started
        busy = core_busy_ms(PROXY_CORE) + core_busy_ms(LOAD_CORE) - busy_begin
        end, worker_end = cost(proxy), cost(worker)
        ours = end.run_ms - begin.run_ms + worker_end.run_ms - worker_begin.run_ms + result.cpu_ms
    seen = result.report
    answers = max(seen["ok"], 1)
    return {
        "peer": peer.name,
        "workload": workload.name,
        "rep": rep,
        "cpu_ms": (end.run_ms - begin.run_ms) / answers,
        "user_ms": (end.user_ms - begin.user_ms) / answers,
        "system_ms": (end.system_ms - begin.system_ms) / answers,
        "worker_cpu_ms": (worker_end.run_ms - worker_begin.run_ms) / answers,
        "proxy_busy": (end.run_ms - begin.run_ms) / seconds / 1000,
        # A fixed number of requests over a fixed time says nothing about speed.
        "rps": None if workload.requests else seen["rps"],
        "p50_ms": _ms(seen, "p50"),
        "p99_ms": _ms(seen, "p99"),
        "delay_p50_us": _delay(seen, "p50"),
        "delay_p99_us": _delay(seen, "p99"),
        "idle_rss_mb": idle.rss / 1e6,
        "peak_rss_mb": peak.rss / 1e6,
        "kb_per_stream": _kb_per_stream(workload, idle, peak),
        "other_load": max(0.0, (busy - ours) / seconds / 20),
        "load": seen,
    }


def _ms(seen: Sample, rank: str) -> float | None:
    return seen["latency_us"][rank] / 1000 if seen["latency_us"] else None


def _delay(seen: Sample, rank: str) -> float | None:
    return seen["delay_us"][rank] if seen["delay_us"] else None


def _kb_per_stream(workload: Workload, idle: Cost, peak: Cost) -> float | None:
    # With few streams the growth is the allocator's, not theirs.
    return (peak.rss - idle.rss) / workload.conns / 1000 if workload.conns >= 1000 else None


def line(sample: Sample) -> str:
    """One repetition, for the eye."""
    text = f"{sample['workload']:8} {sample['peer']:14} rep {sample['rep']}: {sample['cpu_ms']:8.3f} ms CPU/request"
    text += f", core {sample['proxy_busy']:4.0%}, p50 {sample['p50_ms'] or 0:.2f} ms, other {sample['other_load']:.0f}%"
    if sample["rps"]:
        text += f", {sample['rps']:.0f} requests/s"
    if sample["kb_per_stream"]:
        text += f", {sample['kb_per_stream']:.1f} kB a stream"
    if sample["load"]["errors"]:
        text += f"  ERRORS {sample['load']['errors']} {sample['load']['first_error']}"
    return text


def main() -> None:
    """Measure, print the tables, write all samples as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default="dyn-relay,sglang-router,relay", help=f"all, or of {', '.join(PEERS)}")
    parser.add_argument("--workloads", default="A,B,B-paced,C,C-paced,D", help="of workloads.py; `B+` is all of B; all")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the samples go (default: results/TIME.json)")
    parser.add_argument("--unpinned", action="store_true", help="proxy, worker and load on whichever core is free")
    options = parser.parse_args()
    names = list(PEERS) if options.peers == "all" else options.peers.split(",")
    unknown = set(names) - PEERS.keys()
    if unknown:
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    workloads = select(options.workloads)
    procs.require_build()
    now = datetime.now(UTC)
    path = options.json or procs.HERE / "results" / f"{now:%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{now:%Y-%m-%d %H:%M} UTC, {procs.machine()}{'; all cores for all' if options.unpinned else ''}"
    title += f"; medians of {options.reps} (lowest-highest), **x** to {BASELINE}"

    samples: list[Sample] = []
    peers = list(present(names))
    for workload in workloads:
        for rep in range(options.reps):
            for peer in peers:
                samples.append(measure(peer, workload, rep, not options.unpinned))
                print(line(samples[-1]), file=sys.stderr, flush=True)
                path.write_text(json.dumps({"title": title, "samples": samples}, indent=1))
    print(f"{title}\n\n{report(samples)}")
    print(f"samples: {path}", file=sys.stderr)
    if any(sample["load"]["errors"] for sample in samples):
        raise SystemExit("some answers were wrong or missing")


if __name__ == "__main__":
    main()
