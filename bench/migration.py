"""What the death of a worker costs its streams, and those of another worker: `python bench/migration.py`.

N live SSE streams on one worker, 20 on another; the first is killed with SIGKILL. All streams of the dead one go on at
the other, and every token of every answer is checked. Of each that was cut:

- its *gap*: from the kill to the first token of the other worker at the client, less that worker's own time to first
  token, which a fresh request of the same kind tells that is sent to it directly (milliseconds);

of the 20 that were not: the times between two tokens in the seconds before the kill, and from the kill until a second
after the last cut stream went on. A wide gap then is time in which the proxy, or the worker, did not get to them.

The pace is slower where there are more streams, so that the proxy is not at its limit; see `CASES`. With
`--retry-permits P` at most P continuations wait for their first token at a time; *at once* is how many the worker saw.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bodies
import procs
from peers import dyn_relay
from procs import LOAD_CORE, PROXY_CORE
from report import Sample

HEALTHY = 20
#: Of each stream, in seconds at the worker's pace: long enough to be alive before, during and after the storm.
STREAM_SECS = 30
#: An answer that takes longer is an error.
LIMIT_SECS = 45
#: How long all streams run undisturbed, and how long after the last continuation the storm is over, in seconds.
BEFORE_SECS, AFTER_SECS = 5, 1
#: Time to first token of both workers: the prefill of a prompt.
FIRST_US = 50_000
PROMPT = 1024
FRESH = 20


@dataclass(frozen=True, slots=True)
class Case:
    """So many streams on the worker that is killed; its pace, and that of the other one."""

    streams: int
    step_ms: int


#: 5,000 events a second with 100 streams, and with 1,000.
CASES = {case.streams: case for case in (Case(1, 20), Case(100, 20), Case(1000, 200))}


@dataclass(frozen=True, slots=True)
class Stream:
    """When the events of one answer came, in milliseconds since 1970, and which of them was the first after a move."""

    at: list[float]
    moved: int | None


def streams_of(path: Path) -> list[Stream]:
    """What the load generator wrote down: one line a complete answer."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Stream([at / 1000 for at in row["at_us"]], row["moved"]) for row in rows]


def gaps(streams: list[Stream], begin: float, end: float) -> list[float]:
    """Milliseconds between two events, of all pairs whose second one came between `begin` and `end`."""
    return [
        round(then - before, 3)
        for stream in streams
        for before, then in zip(stream.at, stream.at[1:], strict=False)
        if begin < then <= end
    ]


def until(reached: Callable[[], bool], what: str, seconds: float = 15) -> None:
    """Wait for something. Raises `TimeoutError`."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds} s")
        time.sleep(0.05)


def state(port: int, url: str) -> str | None:
    """The state of a worker, as the proxy sees it; None: it is not listed."""
    workers = json.loads(procs.get(port, "/workers"))["workers"]
    return next((worker["state"] for worker in workers if worker["url"] == url), None)


def add(port: int, url: str) -> None:
    """Have a worker join, and wait until it is ready."""
    procs.order(port, "POST", "/workers", {"url": url})
    until(lambda: state(port, url) == "ready", f"{url} is ready")


def measure(case: Case, permits: int, rep: int, folder: Path) -> Sample:
    """One kill, with new workers and a new proxy."""
    port, doomed_port, healthy_port = procs.free_ports(3)
    doomed_url, healthy_url = (f"http://127.0.0.1:{worker}" for worker in (doomed_port, healthy_port))
    pace = ["--mode", "incremental", "--step-us", str(case.step_ms * 1000), "--first-us", str(FIRST_US)]
    fields = {"stream": True, "return_logprob": True}
    tokens = STREAM_SECS * 1000 // case.step_ms
    body = bodies.write(procs.BODIES, f"migration-{tokens}", PROMPT, tokens, fields)
    fresh_body = bodies.write(procs.BODIES, "migration-fresh", PROMPT, 1, fields)

    with ExitStack() as stack:
        pids: list[int] = []
        for worker in (doomed_port, healthy_port):
            command = procs.worker_command(worker, [*pace, "--weight-version", str(worker)])
            pids.append(stack.enter_context(procs.running(command, LOAD_CORE, f"migration-worker{len(pids)}")))
        command = dyn_relay("--retry-permits", str(permits))(port, [healthy_port])
        stack.enter_context(procs.running(command, PROXY_CORE, "migration-proxy"))
        procs.wait_until_serving(port)
        threads = stack.enter_context(ThreadPoolExecutor())

        def begin(name: str, streams: int, ramp_ms: int) -> Future[procs.LoadResult]:
            load = ["--conns", str(streams), "--requests", str(streams), "--ramp-ms", str(ramp_ms)]
            load += ["--timeout-s", str(LIMIT_SECS), "--times", str(folder / name)]
            return threads.submit(procs.load, port, body, load)

        def live(worker: int, streams: int) -> Callable[[], bool]:
            def reached() -> bool:
                stats = procs.mock_stats(worker)
                return stats["requests"] - stats["finished"] == streams

            return reached

        healthy = begin("healthy", HEALTHY, 1000)
        until(live(healthy_port, HEALTHY), "the healthy streams are alive")
        # A worker that leaves keeps what it has, so each of the two gets its own streams, whatever the policy is.
        procs.order(port, "DELETE", f"/workers/{urllib.parse.quote(healthy_url, safe='')}")
        add(port, doomed_url)
        doomed = begin("doomed", case.streams, 2000)
        until(live(doomed_port, case.streams), "the doomed streams are alive")
        add(port, healthy_url)
        fresh = procs.load(healthy_port, fresh_body, ["--conns", "1", "--requests", str(FRESH)])
        time.sleep(BEFORE_SECS)
        procs.mock_stats(healthy_port)  # from now on it counts anew how many wait
        killed = time.time_ns() / 1e6
        os.kill(pids[0], signal.SIGKILL)
        loads = [doomed.result().report, healthy.result().report]
        stats = procs.mock_stats(healthy_port)
        migrations = procs.metric(port, "dyn_relay_migrations_total")

    first_token = fresh.report["first_byte_us"]["p50"] / 1000
    cut, others = streams_of(folder / "doomed"), streams_of(folder / "healthy")
    resumed = [stream.at[stream.moved] for stream in cut if stream.moved is not None]
    over = max(resumed, default=killed) + AFTER_SECS * 1000
    return {
        "streams": case.streams,
        "step_ms": case.step_ms,
        "permits": permits,
        "rep": rep,
        "errors": sum(sum(load["errors"].values()) for load in loads),
        "first_error": loads[0]["first_error"] or loads[1]["first_error"],
        "right": sum(load["ok"] for load in loads),
        "continued": len(resumed),
        "migrations": migrations,
        "at_once": stats["waiting_max"],
        "first_token_ms": first_token,
        "gaps_ms": sorted(round(at - killed - first_token, 3) for at in resumed),
        "healthy_before_ms": sorted(gaps(others, killed - BEFORE_SECS * 1000, killed)),
        "healthy_during_ms": sorted(gaps(others, killed, over)),
        "storm_ms": over - killed - AFTER_SECS * 1000,
    }


def at_share(values: list[float], share: float) -> float:
    """The value below which such a share of the sorted ones lies; NaN of none."""
    return values[round((len(values) - 1) * share)] if values else float("nan")


def shown(values: list[float], *shares: float) -> str:
    """Such percentiles, with a slash between them."""
    return " / ".join(f"{at_share(values, share):.1f}" for share in shares)


HEAD = (
    "streams cut",
    "a token every ms",
    "continued",
    "gap beyond time to first token ms p50 / p99 / max",
    "time to first token ms",
    "permits",
    "at once",
    "healthy streams: between tokens ms before p99 / max",
    "after the kill p99 / max",
    "answers right",
    "errors",
)


def table(samples: list[Sample]) -> str:
    """A row for each case; gaps of all its repetitions together, of other things the median."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for streams in dict.fromkeys(sample["streams"] for sample in samples):
        mine = [sample for sample in samples if sample["streams"] == streams]

        def pooled(key: str, mine: list[Sample] = mine) -> list[float]:
            return sorted(value for sample in mine for value in sample[key])

        def total(key: str, mine: list[Sample] = mine) -> Any:
            return sum(sample[key] for sample in mine)

        cells = [
            streams * len(mine),
            mine[0]["step_ms"],
            total("continued"),
            shown(pooled("gaps_ms"), 0.5, 0.99, 1),
            f"{statistics.median(sample['first_token_ms'] for sample in mine):.1f}",
            mine[0]["permits"],
            max(sample["at_once"] for sample in mine),
            shown(pooled("healthy_before_ms"), 0.99, 1),
            shown(pooled("healthy_during_ms"), 0.99, 1),
            total("right"),
            total("errors"),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def failures(sample: Sample) -> list[str]:
    """What is not as it must be."""
    checks = {
        "every answer complete and right": sample["right"] == sample["streams"] + HEALTHY and not sample["errors"],
        "every cut stream continued by the other worker": sample["continued"] == sample["streams"],
        "one migration each": sample["migrations"] == sample["streams"],
    }
    return [f"{sample['streams']} streams: {name}" for name, good in checks.items() if not good]


def main() -> None:
    """Measure, print the table, write all samples as JSON; exit with 1 if an answer was wrong or not continued."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,100,1000", help=f"of {', '.join(map(str, CASES))}")
    parser.add_argument("--retry-permits", type=int, default=32, help="of the proxy; 0: any number")
    parser.add_argument("--reps", type=int, default=1, help="each takes about 40 s")
    parser.add_argument("--json", type=Path, help="where the samples go (default: results/TIME-migration.json)")
    options = parser.parse_args()
    unknown = set(options.streams.split(",")) - {str(streams) for streams in CASES}
    if unknown:
        parser.error(f"no case of {', '.join(sorted(unknown))} streams; there are {', '.join(map(str, CASES))}")
    procs.require_build()
    now = datetime.now(UTC)
    path = options.json or procs.HERE / "results" / f"{now:%Y%m%d-%H%M%S}-migration.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{now:%Y-%m-%d %H:%M} UTC, {procs.machine()}; {options.reps} kills each"

    samples: list[Sample] = []
    for streams in options.streams.split(","):
        for rep in range(options.reps):
            with tempfile.TemporaryDirectory() as folder:
                samples.append(measure(CASES[int(streams)], options.retry_permits, rep, Path(folder)))
            path.write_text(json.dumps({"title": title, "samples": samples}))
    print(f"{title}\n\n{table(samples)}\n\nsamples: {path}")
    failed = [failure for sample in samples for failure in failures(sample)]
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
