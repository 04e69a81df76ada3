"""Legs of prefill/decode pairs: one room for both, no room twice, and nobody keeps what the other one has lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest

from dyn_testkit.checkers.base import ROUNDING, Finding, places
from dyn_testkit.history import Arrival, Fault, History

#: Seconds within which the worker that is left has nothing more to do with a lost attempt.
SOON = 1.0
#: A room is an int64, and 0 is none.
LAST_ROOM = 2**63 - 1


def check(history: History) -> Iterator[Finding]:
    """Needs workers that told what they were asked; the second part, when they were done with it, and rows."""
    if not history.run.prefills:
        return
    yield from _rooms(history)
    yield from _freed(history)


def _rooms(history: History) -> Iterator[Finding]:
    met: dict[int, list[Arrival]] = defaultdict(list)
    for arrival in history.arrivals:
        room = arrival.body.get("bootstrap_room")
        if type(room) is not int or not 1 <= room <= LAST_ROOM:
            yield Finding("run", "pairs", f"{arrival.worker} was sent to room {room!r}")
            continue
        met[room].append(arrival)
    for room, legs in met.items():
        workers = [leg.worker for leg in legs]
        one_each = len(workers) <= 2 and len({worker in history.run.prefills for worker in workers}) == len(workers)
        if not one_each:
            yield Finding("run", "pairs", f"room {room} was given to {', '.join(workers)}")
        elif len(legs) == 2 and legs[0].body != legs[1].body:
            yield Finding("run", "pairs", f"the legs of room {room} were asked for different things")


def _freed(history: History) -> Iterator[Finding]:
    arrivals: dict[tuple[str, str], list[Arrival]] = defaultdict(list)
    for arrival in history.arrivals:
        arrivals[arrival.worker, str(arrival.body.get("rid") or "")].append(arrival)
    for row in history.rows:
        for attempt, later in zip_longest(row["attempts"], row["attempts"][1:]):
            began = row["time"] - history.run.began
            ended = began + attempt["ended"]
            for url in places(attempt) if attempt["cause"] is not None else ():
                since, until = began + attempt["started"], ended + SOON
                if later is not None and later["rid"] == attempt["rid"]:
                    until = began + later["started"]
                named = [each for each in arrivals[url, attempt["rid"]] if since <= each.at < until]
                if len(named) != 1 or any(_cannot_hear(fault, url, ended) for fault in history.faults):
                    continue  # nothing came, or nothing is sure
                [arrival] = named
                over = max(ended, arrival.at)
                if arrival.left is None or arrival.left > over + SOON + ROUNDING:
                    took = "for ever" if arrival.left is None else f"for {arrival.left - over:.1f} s"
                    what = f"{url} was at work on attempt {attempt['number']} {took} after its end ({attempt['cause']})"
                    yield Finding(row["rid"], "pairs", what)


def _cannot_hear(fault: Fault, url: str, when: float) -> bool:
    """The end of a connection does not reach the worker, or not at once."""
    near = fault.at <= when + SOON and (fault.until is None or when <= fault.until)
    return fault.target == url and near and bool({"dials", "answers"} & set(fault.harms))
