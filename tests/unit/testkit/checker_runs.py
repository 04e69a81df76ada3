"""Histories of runs, and what is wrong about each."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.recorded_answers import event, events, record

from dyn_testkit.history import (
    Arrival,
    Fault,
    History,
    Lease,
    Order,
    Record,
    Run,
    Sample,
    of_records,
    without_answer,
)

TOLERANCE = 1e-4
ROW = {
    "rid": "own",
    "time": 0.0,
    "duration": 3.0,
    "outcome": "done",
    "status": 200,
    "migratable": True,
    "reason": "",
    "error": "",
    "completion_tokens": 4,
    "prompt_tokens": 3,
    "cached_tokens": 0,
}
ATTEMPT = {
    "number": 0,
    "rid": "own",
    "worker": "w1",
    "url": "http://a",
    "cause": None,
    "started": 0.0,
    "first_token": 0.1,
    "last_token": 0.9,
    "ended": 1.0,
    "resumed_from": 0,
    "tokens": 4,
}
SECOND = {**ATTEMPT, "number": 1, "rid": "other", "started": 2.0, "first_token": 2.1, "last_token": 2.9, "ended": 3.0}
WHOLE = {**ROW, "attempts": [ATTEMPT]}
#: It moved after one token.
MOVED = {**ROW, "attempts": [{**ATTEMPT, "tokens": 1}, {**SECOND, "resumed_from": 1, "tokens": 3}]}
LOUD = record("unary", status=502)
HERE = Fault("kill", "http://a", 0.5, 2.5)
THERE = Fault("kill", "http://b", 1.0, 5.0)
DEAD = Fault("kill", "http://a", -15.0, 20.0, harms=("attempts", "health", "answers"))
AGO = {"workers": ["http://a", "http://b"], "notice": 19.0, "inhibited": 2.0}
BOTH = {"workers": ["http://a", "http://b"]}


def run(row: dict[str, Any] | None, got: Record | None = None, **fields: Any) -> History:
    """One answer, and what else is known of its run; other `fields` are samples at the end."""
    got = got or record("unary")
    history = of_records({got.key: got}, {got.key: record("unary")}, TOLERANCE)
    limits = {"migration_limit": 1, "patience": 10.0} | fields.pop("limits", {})
    arrived, orders = fields.pop("arrived", []), fields.pop("orders", [])
    history.run = Run(tolerance=TOLERANCE, traced=row is not None, tapped=bool(arrived or orders), **limits)
    history.rows = [row] if row else []
    if ago := fields.pop("failed_before", 0.0):  # another request, that whose client has left
        tried = {**ATTEMPT, "rid": "third", "cause": "cut", "tokens": 0, "started": 0.0, "ended": 0.0}
        history.rows.append({**ROW, "rid": "third", "time": -ago, "completion_tokens": None, "attempts": [tried]})
        history.records["third"] = record("unary", key="third", left=True, body={**got.body, "rid": "third"})
        history.references["third"] = record("unary", key="third")
    history.faults = fields.pop("faults", [])
    history.leases = fields.pop("leases", [])
    history.arrivals = [one if isinstance(one, Arrival) else Arrival("http://a", 0.0, {"rid": one}) for one in arrived]
    history.orders = [Order(worker, 0.5, rid) for worker, rid in orders]
    history.samples = [Sample(0.0, {"fds": 10, "in_flight": 3}), Sample(9.0, fields)]
    return history


def failed(causes: list[str | None], error: str = "migration_limit", **fields: Any) -> dict[str, Any]:
    """The row of a request that ran out of attempts, or out of what `error` says."""
    attempts = [{**one, "cause": cause, "tokens": 0} for one, cause in zip((ATTEMPT, SECOND), causes, strict=False)]
    ended = {"outcome": "failed", "status": 502, "error": error, "completion_tokens": 0}
    return {**ROW, "attempts": attempts, **ended, **fields}


def moved(**first: Any) -> dict[str, Any]:
    """The row of a request that went on at the same worker after its first attempt was cut."""
    one = {**ATTEMPT, "tokens": 2, "cause": "cut", **first}
    return {**ROW, "attempts": [one, {**SECOND, "tokens": 2, "resumed_from": 2}]}


def late(seconds: float = 2.9) -> Record:
    """The unary answer, that long under way by its own account."""
    said = events("unary")
    said[-1]["meta_info"]["e2e_latency"] = seconds
    return record("unary", said)


def asked(rid: str = "own", made: Any = None, **sampling: Any) -> Arrival:
    """What a worker got."""
    body = {**record("unary").body, "rid": rid}
    return Arrival("http://a", 0.0, {**body, "sampling_params": {**body["sampling_params"], **sampling}}, made)


def relabelled(mode: str) -> Record:
    """All tokens are said to be of other weights; of a stream, they come two at a time."""
    said = [event(mode, 0, 2), event(mode, 2, 4)] if mode != "unary" else events(mode)
    for each in said:
        each["meta_info"]["weight_version"] = "v2"
    said[-1]["meta_info"]["weight_versions"] = [{"version": "v2", "start": 0, "end": 4}]
    return record(mode, said)


#: Its only attempt was lost with its last word.
TOLD = [("http://a", "own")]
CUT = {**ROW, "outcome": "completed_here", "attempts": [{**ATTEMPT, "cause": "cut"}]}
LOST = [{**ATTEMPT, "number": number, "cause": "cut", "tokens": 0, "ended": 0.0} for number in range(2)]
REFUSED = [{**one, "cause": "connect"} for one in LOST]

#: What is right about a run, and wrong.
RUNS: dict[str, tuple[History, set[str]]] = {
    "all is well": (run(WHOLE), set()),
    "it moved": (run(MOVED, late()), set()),
    "finished here": (run({**WHOLE, "outcome": "completed_here"}), set()),
    "it was only forwarded": (
        run({**WHOLE, "completion_tokens": None, "cached_tokens": None, "attempts": [{**ATTEMPT, "tokens": 0}]}),
        set(),
    ),
    "no row": (run({**WHOLE, "rid": "other"}), {"exactly_once"}),
    "no row of a client that left before any answer": (
        run({**WHOLE, "rid": "other"}, record("unary", status=0, left=True, error="the client left")),
        set(),
    ),
    "attempts at the same time": (
        run({**MOVED, "attempts": [MOVED["attempts"][0], {**MOVED["attempts"][1], "started": 0.5}]}, late()),
        {"exactly_once"},
    ),
    "tokens that no attempt gave": (run({**WHOLE, "completion_tokens": 5}), {"exactly_once", "rows"}),
    "a token less than the client has": (
        run({**WHOLE, "completion_tokens": 3, "attempts": [{**ATTEMPT, "tokens": 3}]}),
        {"rows"},
    ),
    "tokens less than a client has that left": (
        run({**WHOLE, "completion_tokens": 3, "attempts": [{**ATTEMPT, "tokens": 3}]}, record("unary", left=True)),
        {"rows"},
    ),
    "a continuation from elsewhere": (
        run({**MOVED, "attempts": [MOVED["attempts"][0], {**MOVED["attempts"][1], "resumed_from": 0}]}, late()),
        {"rows"},
    ),
    "a prompt of another length": (run({**WHOLE, "prompt_tokens": 4}), {"rows"}),
    "another share in the cache": (run({**WHOLE, "cached_tokens": 1}), {"rows"}),
    "as many tokens as an answer had that was not kept": (run(WHOLE, without_answer(record("unary"), 4)), set()),
    "less tokens than an answer had that was not kept": (run(WHOLE, without_answer(record("unary"), 5)), {"rows"}),
    "a failure of what came whole": (run({**WHOLE, "outcome": "failed"}), {"rows"}),
    "an error of what came whole": (run({**WHOLE, "error": "no_worker"}), {"rows"}),
    "another status": (run({**WHOLE, "status": 503}), {"rows"}),
    "the header of a protected request": (run({**WHOLE, "migratable": False, "reason": "n"}), {"rows"}),
    "no header": (
        run(WHOLE, record("unary", headers={"content-type": "application/json"})),
        {"rows"},
    ),
    "a success that failed": (
        run({**failed(["cut", "cut"]), "outcome": "done"}, LOUD, faults=[HERE]),
        {"rows"},
    ),
    "an attempt that is in no row": (run(WHOLE, arrived=["own", "twin"]), {"exactly_once"}),
    "an attempt that was sent twice": (run(WHOLE, arrived=["own", "own"]), {"exactly_once"}),
    "the same worker again": (
        run(failed(["cut", "cut"]), LOUD, faults=[HERE], limits=BOTH),
        {"exclusion"},
    ),
    "the same worker again, there is no other": (
        run(failed(["cut", "cut"]), LOUD, faults=[HERE], limits={"workers": ["http://a"]}),
        set(),
    ),
    "a lease": (run(WHOLE, in_flight=1), {"leases"}),
    "a worker with a lease": (run(WHOLE, leases=[Lease("http://a", 0.0, 60.0)]), set()),
    "a worker that had no lease yet": (run(WHOLE, leases=[Lease("http://a", 0.5, 60.0)]), {"tenure"}),
    "descriptors": (run(WHOLE, fds=1000), {"leak"}),
    "an answer that came late": (run(WHOLE, record("unary", ended=11.0)), {"liveness"}),
    "a failure that faults explain": (run(failed(["cut", "cut"]), LOUD, faults=[HERE]), set()),
    "a failure at the moment of its fault": (
        run({**moved(ended=0.7), "time": 0.1}, late(), faults=[replace(HERE, at=0.8, until=0.8)]),
        set(),
    ),
    "a failure that nothing explains": (run(failed(["cut", "cut"]), LOUD), {"liveness", "causes"}),
    "a failure that nothing explains, survived": (run(moved(), late()), {"causes"}),
    "two losses where one may be": (
        run({**ROW, "attempts": [*LOST, SECOND]}, late(), faults=[DEAD], limits={"workers": ["http://a"]}),
        {"limit"},
    ),
    "finished here after two losses": (
        run(
            {**ROW, "outcome": "completed_here", "attempts": [LOST[0], {**SECOND, "cause": "cut"}]},
            late(),
            faults=[DEAD],
            limits={"workers": ["http://a"]},
        ),
        set(),
    ),
    "a worker again and again": (
        run({**ROW, "attempts": [*REFUSED, SECOND]}, faults=[DEAD], limits={"workers": ["http://a"]}),
        {"limit"},
    ),
    "to a worker that has just failed": (
        run(
            {**ROW, "attempts": [ATTEMPT]},
            faults=[DEAD],
            failed_before=0.5,
            limits=AGO,
        ),
        {"avoidance"},
    ),
    "to a worker that failed what it had been told to end": (
        run(
            {**ROW, "attempts": [ATTEMPT]},
            faults=[DEAD],
            failed_before=0.5,
            orders=[("http://a", "third")],
            arrived=["own", "third"],
            limits=AGO,
        ),
        set(),
    ),
    "to a worker that failed long ago": (
        run(
            {**ROW, "attempts": [ATTEMPT]},
            faults=[DEAD],
            failed_before=2.5,
            limits=AGO,
        ),
        set(),
    ),
    "to a worker that is known to be dead": (run(WHOLE, faults=[DEAD], limits={**BOTH, "notice": 1.0}), {"avoidance"}),
    "there is no other": (run(WHOLE, faults=[DEAD], limits={"workers": ["http://a"], "notice": 1.0}), set()),
    "it is not known yet": (run(WHOLE, faults=[DEAD], limits={**BOTH, "notice": 16.0}), set()),
    "nobody waits for ever": (
        run(
            {**WHOLE, "attempts": [{**ATTEMPT, "ended": 3.0}]}, faults=[replace(DEAD, at=0.2)], limits={"silence": 2.0}
        ),
        {"silence"},
    ),
    "nobody waits for ever, but for a client": (
        run(
            {**WHOLE, "attempts": [{**ATTEMPT, "ended": 3.0}]},
            faults=[replace(DEAD, at=0.2), Fault("dawdle", "http://b", 0.0, 9.0, harms=("clients",))],
            limits={"silence": 2.0},
        ),
        set(),
    ),
    "a little": (
        run(
            {**WHOLE, "attempts": [{**ATTEMPT, "ended": 3.0}]}, faults=[replace(DEAD, at=0.2)], limits={"silence": 2.9}
        ),
        set(),
    ),
    "tokens of other weights": (run(WHOLE, arrived=[asked(made=[("default", 0, 3), ("v2", 3, 4)])]), {"versions"}),
    "tokens of their weights": (run(WHOLE, arrived=[asked(made=[("default", 0, 4)])]), set()),
    "tokens of the event that brought other weights": (
        run(
            CUT,
            relabelled("incremental"),
            faults=[DEAD],
            arrived=[asked(made=[("default", 0, 1), ("v2", 1, 4)])],
            orders=TOLD,
        ),
        set(),
    ),
    "tokens of the event after it": (
        run(
            CUT,
            relabelled("incremental"),
            faults=[DEAD],
            arrived=[asked(made=[("default", 0, 3), ("v2", 3, 4)])],
            orders=TOLD,
        ),
        {"versions"},
    ),
    "a finished attempt's are known": (
        run(WHOLE, relabelled("incremental"), arrived=[asked(made=[("default", 0, 1), ("v2", 1, 4)])]),
        {"versions"},
    ),
    "a unary answer's are known": (
        run(
            CUT,
            relabelled("unary"),
            faults=[DEAD],
            arrived=[asked(made=[("default", 0, 1), ("v2", 1, 4)])],
            orders=TOLD,
        ),
        {"versions"},
    ),
    "a clock that began anew": (run(moved(), late(0.9), faults=[HERE]), {"latency"}),
    "a clock that ran on": (run(moved(), late(), faults=[HERE]), set()),
    "another temperature": (run(WHOLE, arrived=[asked(temperature=0.5)]), {"requests"}),
    "an attempt that nobody was told to drop": (
        run(moved(), late(), faults=[HERE], arrived=[asked(), asked("other")]),
        {"orders"},
    ),
    "an attempt that its worker was told to drop": (
        run(moved(), late(), faults=[HERE], arrived=[asked(), asked("other")], orders=[("http://a", "own")]),
        set(),
    ),
    "another worker was told, when all was over": (
        run({**WHOLE, "duration": 0.4}, arrived=[asked()], orders=[("http://b", "own")]),
        set(),
    ),
    "another worker was told": (run(WHOLE, arrived=[asked()], orders=[("http://b", "own")]), {"orders"}),
    "an abort that was not heard": (
        run(WHOLE, record("unary", left=True, aborted=-100.0), arrived=[asked()]),
        {"orders"},
    ),
    "an abort whose client reads on": (
        run({**WHOLE, "duration": 100.0}, record("unary", left=True, aborted=0.5), arrived=[asked()]),
        set(),
    ),
    "an abort that came when all was over": (
        run(WHOLE, record("unary", left=True, aborted=3.5, ended=100.0), arrived=[asked()], limits={"patience": None}),
        set(),
    ),
    "an attempt that never arrived": (run(WHOLE, arrived=[replace(asked(), worker="http://b")]), {"exactly_once"}),
    "a failure after the fault": (
        run(failed(["cut", "stall"]), LOUD, faults=[Fault("kill", "http://a", 0.5, 1.0)]),
        {"liveness", "causes"},
    ),
    "a failure elsewhere": (
        run(failed(["cut", "cut"]), LOUD, faults=[Fault("kill", "http://b", 0.5, 2.5)]),
        {"liveness", "causes"},
    ),
    "a failure beside something harmless": (
        run(failed(["cut", "cut"]), LOUD, faults=[Fault("slow", "http://a", 0.5, 2.5, harms=())]),
        {"liveness", "causes"},
    ),
    "a failure that faults do not bring about": (run(failed(["cut"], "eos"), LOUD, faults=[HERE]), {"liveness"}),
    "an unprotected failure": (
        run(
            failed(["cut"], "n", migratable=False, reason="n"),
            record("unary", status=502, headers={"x-dyn-relay-migratable": "no; reason=n"}),
            faults=[HERE],
        ),
        set(),
    ),
    "no other worker": (
        run(failed(["cut"], "no_survivor"), LOUD, faults=[HERE, THERE], limits=BOTH),
        set(),
    ),
    "another worker was there": (
        run(failed(["cut"], "no_survivor"), LOUD, faults=[HERE], limits=BOTH),
        {"liveness"},
    ),
    "another worker was there again": (
        run(
            failed(["cut"], "no_survivor", duration=6.0),
            LOUD,
            faults=[HERE, THERE],
            limits=BOTH,
        ),
        {"liveness"},
    ),
    "hope given up too early": (run(failed(["cut"]), LOUD, faults=[HERE]), {"liveness"}),
    "a failure where none may be": (
        run(failed(["cut", "cut"]), LOUD, faults=[HERE], limits={"migration_limit": None}),
        {"liveness"},
    ),
    "a silent failure": (
        run(failed(["cut", "cut"], status=200), record("unary", text="{}"), faults=[HERE]),
        {"liveness"},
    ),
}
