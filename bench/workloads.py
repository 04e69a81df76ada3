"""What we measure: a body, a pace of the worker, a number of connections."""

from __future__ import annotations

from dataclasses import dataclass

#: Saturated runs of one repetition last so many seconds, after so many of warming up.
SATURATED_SECS = 4
WARM_SECS = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the table."""

    name: str
    what: str
    body: str
    conns: int
    worker: tuple[str, ...] = ()
    requests: int = 0
    """Requests of a repetition; 0: as many as go into `SATURATED_SECS`."""
    ramp_ms: int = 0

    @property
    def load(self) -> list[str]:
        """The load generator's options for one repetition."""
        amount = ["--requests", str(self.requests)] if self.requests else ["--secs", str(SATURATED_SECS)]
        return ["--conns", str(self.conns), "--ramp-ms", str(self.ramp_ms), *amount]

    @property
    def warm(self) -> tuple[str, list[str]]:
        """Body and options of a warming-up run: the workload's own, or for paced ones a short quick one."""
        if self.requests:
            return "warm", ["--conns", "16", "--requests", "200"]
        return self.body, ["--conns", str(self.conns), "--secs", str(WARM_SECS)]


_INCREMENTAL = ("--mode", "incremental")
_PACED = ("--step-us", "20000", "--sync")

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("A", "128 ids, 16 tokens, unary, saturated", "A", 64),
        Workload("A-one", "the same, one connection", "A", 1),
        Workload("B", "1,024 ids, SSE of 256 events with logprobs, saturated", "B", 64, _INCREMENTAL),
        Workload("B-paced", "the same, 64 streams in step, 20 ms", "B", 64, _INCREMENTAL + _PACED, requests=64),
        Workload("B-low", "the same, 4 streams, 10 ms", "B", 4, (*_INCREMENTAL, "--step-us", "10000"), requests=4),
        Workload(
            "B-fast",
            "the same, 64 streams, each by itself, 2 ms",
            "B",
            64,
            (*_INCREMENTAL, "--step-us", "2000"),
            requests=128,
        ),
        Workload("B-one", "the same, one connection, no pace", "B", 1, _INCREMENTAL),
        Workload("C", "as B, cumulative, saturated", "B", 32),
        Workload("C-paced", "as B, cumulative, 32 streams in step, 20 ms", "B", 32, _PACED, requests=32),
        Workload("D", "2,048 ids, 8,192 tokens with logprobs, unary, cumulative worker", "D", 16),
        Workload("D-inc", "the same, incremental worker", "D", 16, _INCREMENTAL),
        Workload("D-one", "as D, one connection", "D", 1),
        Workload(
            "E",
            "2,000 SSE streams of 120 events, one every 250 ms",
            "E",
            2000,
            (*_INCREMENTAL, "--step-us", "250000"),
            requests=2000,
            ramp_ms=4000,
        ),
    )
}

#: Names that stand for several rows.
GROUPS = {
    "A": ("A", "A-one"),
    "B": ("B", "B-paced", "B-low", "B-fast", "B-one"),
    "C": ("C", "C-paced"),
    "D": ("D", "D-inc", "D-one"),
    "E": ("E",),
}


def select(text: str) -> list[Workload]:
    """The rows that a comma-separated list names; `A+` is all rows of A, `all` all of all. Raises `SystemExit`."""
    chosen: list[Workload] = []
    for name in (",".join(WORKLOADS) if text == "all" else text).split(","):
        names = GROUPS.get(name[:-1], ()) if name.endswith("+") else (name,)
        if not names or not set(names) <= WORKLOADS.keys():
            raise SystemExit(f"no workload {name}; there are {', '.join(WORKLOADS)} and {', '.join(GROUPS)} with a +")
        chosen += [WORKLOADS[each] for each in names]
    return chosen
