"""A run with all that a report shows: streams that move, a fault, an answer that broke off, samples, hostile text."""

from __future__ import annotations

from typing import Any

import msgspec

from dyn_testkit.checkers import Finding
from dyn_testkit.history import Fault, History, Record, Run, Sample
from tests.recorded_answers import record

#: What no page may take for anything but text.
HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
URLS = {"w1": "http://127.0.0.1:30001", "w2": "http://127.0.0.1:30002"}


def stream(key: str, sent: float, pauses: tuple[float, float], **changes: Any) -> Record:
    """An answer of three events; the first half a second after it was asked for, the others after these pauses."""
    first = sent + 0.5
    times = [first, first + pauses[0], first + sum(pauses)]
    body = {**record("incremental").body, "rid": f"rid-{key}"}
    made: dict[str, Any] = {"key": key, "body": body, "sent": sent, "times": times, "ended": times[-1]}
    return record("incremental", **{**made, **changes})


def attempt(number: int, worker: str, **changes: Any) -> dict[str, Any]:
    made = {"number": number, "worker": worker, "url": URLS[worker], "rid": f"attempt-{number}"}
    made |= {
        "started": 0.0,
        "first_token": 0.5,
        "ended": 1.0,
        "tokens": 4,
        "resumed_from": 0,
        "cause": None,
        "detail": "",
    }
    return {**made, **changes}


def row(rid: str, time: float, *attempts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    made = {"time": time, "rid": rid, "path": "/generate", "streaming": True, "outcome": "done", "status": 200}
    made |= {"prompt_tokens": 3, "completion_tokens": 4, "duration": 1.0, "attempts": list(attempts)}
    return {**made, **changes}


def stormy(quiet: int = 40) -> tuple[History, list[Finding]]:
    """Some quiet requests, one a second; one that moves from w1 to w2, one that fails, one whose client leaves."""
    history = History(
        Run(
            name=f"storm {HOSTILE}",
            seed=7,
            commit="0123abcd",
            traced=True,
            settings={"moves": True, "command": f"storm --streams {quiet}"},
        )
    )
    for number in range(quiet):
        key = f"{number:03d}"
        history.add(stream(key, float(number), (0.1, 0.1)))
        history.rows.append(row(f"rid-{key}", float(number), attempt(0, "w2", ended=0.7)))
    moved = stream("moved", 10.0, (0.1, 2.0))
    history.add(msgspec.structs.replace(moved, body={**moved.body, "note": HOSTILE, "input_ids": list(range(900))}))
    history.rows.append(
        row(
            "rid-moved",
            10.0,
            attempt(0, "w1", ended=0.8, tokens=2, cause="cut", detail=f"reset {HOSTILE}"),
            attempt(1, "w2", started=0.9, first_token=2.5, ended=2.6, tokens=2, resumed_from=2),
        )
    )
    history.add(stream("failed", 12.0, (0.1, 0.1), events=[HOSTILE], times=[12.5], done=False, error=HOSTILE))
    history.rows.append(row("rid-failed", 12.0, attempt(0, "w1", tokens=0, cause="cut", first_token=None)))
    history.add(stream("gone", 14.0, (0.1, 0.1), left=True, done=False, error="the client left"))
    history.faults.append(Fault("kill", URLS["w1"], 10.65, 15.0, f"the process ended {HOSTILE}", {"signal": 9}))
    for number in range(30):
        values = {"fds": 40.0 + number % 3, "rss": 5e7 + 1e5 * number, 'waiting{worker="w1"}': float(number % 2)}
        history.samples.append(Sample(number * 1.5, values))
    return history, [
        Finding("moved", "tokens", f"the tokens are wrong {HOSTILE}"),
        Finding("rid-failed", "exactly_once", "2 rows"),
        Finding("campaign", "vacuous", "nothing was shown"),
    ]


def bare() -> History:
    """One stream and one unary answer, and nothing else of the run."""
    history = History()
    history.add(stream("stream", 0.0, (0.1, 0.1)))
    history.add(record("unary", key="unary", ended=1.0))
    return history
