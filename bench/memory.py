"""What a live request holds of the proxy's memory: `python bench/memory.py [--tokens 2000] [--streams 2000]`.

All requests are held before their last token, when the proxy has passed on all others and does nothing any more. Then
its resident bytes, less those before the first request, over the number of requests. Two lengths, a tenth of `--tokens`
and all of them: the difference is what each delivered token leaves behind, in bytes. Every token is checked.

2,000 tokens take a minute a row; `--tokens 32768` is the full run, of a quarter of an hour for each row of streams, and
for incremental workers only (cumulative events grow with each token). Unary answers are few: one of 32,768 tokens with
logprobs is more than a megabyte, which whoever may have to continue it has to keep.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import bodies
import procs
from peers import PEERS, Peer, dyn_relay
from procs import LOAD_CORE, PROXY_CORE, Cost, cost
from report import Sample

PROMPT = 1024
RAMP_MS = 4000
#: The proxy is idle if it uses less than so much of its core between two looks.
IDLE_SHARE = 0.05

#: No body is short enough to be kept for a continuation, so no request is migratable.
CAPPED = Peer("dyn-relay-capped", "this project with `--replay-buffer-max 1`", dyn_relay("--replay-buffer-max", "1"))
MEASURED = {peer.name: peer for peer in (PEERS["dyn-relay"], CAPPED, PEERS["dyn-relay-off"], PEERS["sglang-router"])}


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind."""

    what: str
    fields: dict[str, bool]


KINDS = {
    "sse": Kind("SSE, logprobs", {"stream": True, "return_logprob": True}),
    "unary": Kind("unary, logprobs", {"return_logprob": True}),
}


class Watch:
    """Looks at a proxy until all its requests are held and it is idle; then lets them go."""

    def __init__(self, proxy: int, worker_port: int, requests: int) -> None:
        self.proxy, self.worker_port = proxy, worker_port
        self.expected = procs.mock_stats(worker_port)["requests"] + requests
        self.before = self.last = cost(proxy)
        self.looked, self.peak = time.monotonic(), self.before.rss
        self.held: tuple[int, Cost] | None = None
        """How many requests were held, and what the proxy held then."""

    def bytes_per_request(self) -> float:
        """Resident bytes. Raises `RuntimeError` if no request was ever held."""
        if self.held is None:
            raise RuntimeError("all requests ended before they could be looked at")
        requests, seen = self.held
        return (seen.rss - self.before.rss) / requests

    def __call__(self) -> None:
        now, seen = time.monotonic(), cost(self.proxy)
        share = (seen.run_ms - self.last.run_ms) / 1000 / (now - self.looked)
        self.looked, self.last, self.peak = now, seen, max(self.peak, seen.rss)
        if self.held is not None or share > IDLE_SHARE:
            return
        stats = procs.mock_stats(self.worker_port)
        live = stats["requests"] - stats["finished"] - stats["left"] - stats["cut"]
        if stats["requests"] >= self.expected and stats["held"] == live > 0:
            self.held = live, seen
            procs.get(self.worker_port, "/mock_release")


def measure(peer: Peer, kind: str, requests: int, tokens: int, mode: str) -> Sample:
    """Requests of one length, with a new worker and a new proxy."""
    worker_port, port = procs.free_ports(2)
    name = f"memory-{peer.name}"
    body = bodies.write(procs.BODIES, f"memory-{kind}-{tokens}", PROMPT, tokens, KINDS[kind].fields)
    worker = procs.worker_command(worker_port, ["--hold", "--mode", mode])
    with (
        procs.running(worker, LOAD_CORE, f"{name}-worker"),
        procs.running(peer.command(port, [worker_port]), PROXY_CORE, name) as proxy,
    ):
        procs.wait_until_serving(port)
        time.sleep(1)
        watch = Watch(proxy, worker_port, requests)
        load = ["--conns", str(requests), "--requests", str(requests), "--ramp-ms", str(RAMP_MS), "--timeout-s", "7200"]
        report = procs.load(port, body, load, watch).report
    return {
        "peer": peer.name,
        "kind": kind,
        "mode": mode,
        "requests": requests,
        "tokens": tokens,
        "idle_bytes": watch.before.rss,
        "peak_bytes": watch.peak,
        "bytes_per_request": watch.bytes_per_request(),
        "load": report,
    }


def slope(short: Sample, long: Sample) -> float:
    """Bytes that one more delivered token leaves behind."""
    return float((long["bytes_per_request"] - short["bytes_per_request"]) / (long["tokens"] - short["tokens"]))


HEAD = ("requests", "peer", "live at once", "idle MB", "kB a request", "kB a request", "B a token", "peak MB", "errors")


def table(pairs: list[tuple[Sample, Sample]]) -> str:
    """A row for each kind of request and peer, of its two lengths."""
    lines: list[str] = []
    for short, long in pairs:
        if not lines:
            heads = list(HEAD)
            heads[4:6] = [f"kB a request after {sample['tokens'] - 1:,} tokens" for sample in (short, long)]
            lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        cells = [
            KINDS[long["kind"]].what,
            long["peer"],
            f"{long['requests']:,}",
            f"{long['idle_bytes'] / 1e6:.0f}",
            *(f"{sample['bytes_per_request'] / 1000:.1f}" for sample in (short, long)),
            f"{slope(short, long):.2f}",
            f"{long['peak_bytes'] / 1e6:.0f}",
            str(sum(sum(sample["load"]["errors"].values()) for sample in (short, long))),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write all samples as JSON; exit with 1 if an answer was wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, help="of the longer of the two lengths; 100 and more")
    parser.add_argument("--streams", type=int, default=2000, help="SSE requests at once")
    parser.add_argument("--unary", type=int, default=200, help="unary requests at once")
    parser.add_argument("--peers", default=",".join(MEASURED), help="of these")
    parser.add_argument("--mode", choices=["incremental", "cumulative"], default="incremental", help="of the worker")
    parser.add_argument("--json", type=Path, help="where the samples go (default: results/TIME-memory.json)")
    options = parser.parse_args()
    names = options.peers.split(",")
    if unknown := set(names) - MEASURED.keys():
        parser.error(f"no peer {', '.join(sorted(unknown))} here; there are {', '.join(MEASURED)}")
    if options.tokens < 100:
        parser.error("--tokens: 100 at least, since a tenth of them is measured too")
    procs.require_build()
    now = datetime.now(UTC)
    path = options.json or procs.HERE / "results" / f"{now:%Y%m%d-%H%M%S}-memory.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{now:%Y-%m-%d %H:%M} UTC, {procs.machine()}; {PROMPT:,} prompt ids, {options.mode} worker"

    pairs: list[tuple[Sample, Sample]] = []
    for kind, requests in (("sse", options.streams), ("unary", options.unary)):
        for name in names:
            lengths = (options.tokens // 10, options.tokens)
            short, long = (measure(MEASURED[name], kind, requests, tokens, options.mode) for tokens in lengths)
            pairs.append((short, long))
            path.write_text(
                json.dumps({"title": title, "samples": [each for pair in pairs for each in pair]}, indent=1)
            )
    print(f"{title}\n\n{table(pairs)}\n\nsamples: {path}")
    if any(sample["load"]["errors"] for pair in pairs for sample in pair):
        raise SystemExit("some answers were wrong or missing")


if __name__ == "__main__":
    main()
