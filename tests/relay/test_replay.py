"""G1-G6: rows of experts and indexer outlive their workers, for the four trainers that read them."""

from __future__ import annotations

import base64
import itertools
from dataclasses import replace

import pytest

from dyn_testkit import faults
from dyn_testkit.decoders import DECODERS, Misread, Shape
from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, KILL_WORKER, FaultPlan, at_token
from dyn_testkit.oracle import Oracle, differences, fold
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import generate
from tests.relay.harness import judged, world

MODEL = Model()
SHAPE = Shape(MODEL.layers, MODEL.experts_per_token)
N, PROMPT = 9, [5, 6, 7]
DIALECTS = ("cumulative", "incremental", "mixed")
#: No expert has such a number by itself, and no position either: rows tell who computed them.
MARKS = [1 << 20, 2 << 20, 3 << 20, 4 << 20]
both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
dialects = pytest.mark.parametrize("dialect", DIALECTS)
FIELDS = ("routed_experts", "indexer_topk")
ASKED = {"return_routed_experts": True, "return_indexer_topk": True}


def asked(stream, **more):
    return generate(N, stream=stream, sampling={"stream_interval": 1}, **{**ASKED, **more})


def workers(count, **options):
    both = {"routed_experts": True, "indexer_topk": True}
    return [WorkerOptions(expert_mark=MARKS[at], **(both | options)) for at in range(count)]


def whole(response, stream, dialect):
    return fold(response.values(), dialect) if stream else response.json()


def wanted(body, owners):
    """The rows of each field, those of the i-th position by the worker `owners[i]`."""
    oracles = [Oracle(MODEL, routed_experts=True, indexer_topk=True, expert_mark=mark) for mark in MARKS]
    answers = [oracle.answer(body) for oracle in oracles]
    found = {}
    for field in FIELDS:
        rows = [DECODERS["miles"](answer, PROMPT, SHAPE, field) for answer in answers]
        found[field] = [rows[owner][at] for at, owner in enumerate(owners)]
    return found


async def answer_after(lives, body, options, dialect, **config):
    """The answer when attempt i ends after `lives[i]` tokens of its own, its trace row, and what workers were asked."""
    plans = [FaultPlan.in_order([(at_token(k), CLOSE)]) for k in lives]
    options = [replace(one, dialect=dialect) for one in options]
    async with world(plans=[*plans, None], options=options, policy="round_robin", **config) as w:
        response = await w.ask(body)
        await w.quiet()
        for plan in plans:
            plan.verify()
        sent = [recorded.json() for worker in w.workers for recorded in worker.generates]
        return response, w.rows[0], sent


@both
@dialects
@pytest.mark.parametrize("cuts", range(4))
async def test_four_trainers_accept_a_merged_answer(autojump_clock, stream, dialect, cuts):
    """G2, G3: stock tells rows with its finish only, so the last worker's finish has them all, once."""
    for lives in itertools.product((1, 2), repeat=cuts):
        body = asked(stream)
        response, row, _ = await answer_after(lives, body, workers(cuts + 1), dialect)
        answer = whole(response, stream, dialect)
        rows = wanted(body, [cuts] * (len(PROMPT) + N - 1))
        for name, decode in DECODERS.items():
            for field in FIELDS:
                assert decode(answer, PROMPT, SHAPE, field) == rows[field], (name, field, lives)
        before = len(PROMPT) + row["attempts"][-1]["resumed_from"] - 1  # a first event may wait until its dialect shows
        again = {field: [(0, before)] for field in FIELDS} if cuts else {}
        assert row["recomputed_rows"] == again
        assert "dyn_relay_recomputed_rows" not in answer["meta_info"]


@both
@dialects
@pytest.mark.parametrize("cuts", range(1, 4))
async def test_rows_that_were_told_stay_those_of_who_sampled_from_them(autojump_clock, stream, dialect, cuts):
    """G1: an engine that tells rows with every event."""
    for lives in itertools.product((1, 2), repeat=cuts):
        body = asked(stream)
        response, row, _ = await answer_after(lives, body, workers(cuts + 1, early_rows=True), dialect)
        answer = whole(response, stream, dialect)
        owners = [0] * (len(PROMPT) - 1)
        for attempt in row["attempts"]:  # a first event may have waited until its dialect showed
            owners += [attempt["number"]] * attempt["tokens"]
        rows = wanted(body, owners)
        for field in FIELDS:
            for name, decode in DECODERS.items():
                assert decode(answer, PROMPT, SHAPE, field) == rows[field], (name, field, lives)
        assert row["recomputed_rows"] == {}
        if stream:
            for value in response.values():
                meta = value["meta_info"]
                so_far = DECODERS["areal"](value, PROMPT, SHAPE, "indexer_topk")
                assert so_far == rows["indexer_topk"][: len(PROMPT) + meta["completion_tokens"] - 1]


@both
async def test_told_by_the_first_worker_alone(autojump_clock, stream):
    """The second tells rows with its finish: those of the first stay, and nothing else was computed again."""
    body = asked(stream)
    first, second = workers(2)
    response, row, _ = await answer_after([4], body, [replace(first, early_rows=True), second], "incremental")
    rows = wanted(body, [0] * (len(PROMPT) + 3) + [1] * (N - 4))
    for field in FIELDS:
        assert DECODERS["miles"](whole(response, stream, "incremental"), PROMPT, SHAPE, field) == rows[field]
    assert row["recomputed_rows"] == {}


@both
async def test_told_by_the_second_worker_alone(autojump_clock, stream):
    """What the second went through again is marked; the third's finish takes nothing from it."""
    body = asked(stream)
    first, second, third = workers(3)
    options = [first, replace(second, early_rows=True), third]
    response, row, _ = await answer_after([2, 3], body, options, "mixed")
    rows = wanted(body, [1] * (len(PROMPT) + 4) + [2] * (N - 5))
    for field in FIELDS:
        assert DECODERS["miles"](whole(response, stream, "mixed"), PROMPT, SHAPE, field) == rows[field]
    assert row["recomputed_rows"] == {field: [(0, 4)] for field in FIELDS}


@both
@dialects
@pytest.mark.parametrize("early", [False, True], ids=["stock", "early"])
async def test_the_clients_start_stays(autojump_clock, stream, dialect, early):
    """G3: `routed_experts_start_len` is a position of the client's sequence; the indexer's rows have no start."""
    for start in (1, 3):
        body = asked(stream, routed_experts_start_len=start)
        response, row, sent = await answer_after([2, 2], body, workers(3, early_rows=early), dialect)
        answer = whole(response, stream, dialect)
        owners = [0] * (len(PROMPT) + 1) + [1] * 2 + [2] * (N - 4) if early else [2] * (len(PROMPT) + N - 1)
        rows = wanted(asked(stream), owners)
        answer["meta_info"]["routed_experts_start_len"] = start
        assert DECODERS["slime"](answer, PROMPT, SHAPE) == rows["routed_experts"][start:]
        assert DECODERS["miles"](answer, PROMPT, SHAPE, "indexer_topk") == rows["indexer_topk"]
        assert [one["routed_experts_start_len"] for one in sent] == [start] * 3
        again = {"routed_experts": [(start, 6)], "indexer_topk": [(0, 6)]}
        assert row["recomputed_rows"] == ({} if early else again)


@both
async def test_an_answer_says_so_itself_if_asked_to(autojump_clock, stream):
    body = asked(stream)
    response, _, _ = await answer_after([4], body, workers(2), "cumulative", tell_recomputed_rows=True)
    meta = whole(response, stream, "cumulative")["meta_info"]
    assert meta["dyn_relay_recomputed_rows"] == {field: [[0, len(PROMPT) + 3]] for field in FIELDS}
    response, _, _ = await answer_after([], body, workers(1), "cumulative", tell_recomputed_rows=True)
    assert "dyn_relay_recomputed_rows" not in whole(response, stream, "cumulative")["meta_info"]


# -- who may go on

BARE = {"routed_experts": False, "indexer_topk": False}


@both
@pytest.mark.parametrize("field", FIELDS)
async def test_a_worker_without_the_rows_is_not_chosen(autojump_clock, stream, field):
    """G4: neither at the beginning nor for a continuation, while there is one that has them."""
    body = generate(N, stream=stream, sampling={"stream_interval": 1}, **{f"return_{field}": True})
    able, unable = WorkerOptions(**(BARE | {field: True})), WorkerOptions(**BARE)
    plans = [None, FaultPlan.in_order([(at_token(3), KILL_WORKER)]), None, None]
    async with world(plans=plans, options=[unable, able, unable, able], policy="round_robin") as w:
        response = await w.ask(body)
        oracle = Oracle(MODEL, **{field: True})
        assert judged(response, body, oracle) == []
        assert [len(worker.generates) for worker in w.workers] == [0, 1, 0, 1]


@both
@pytest.mark.parametrize("field", FIELDS)
async def test_never_a_short_array(autojump_clock, stream, field):
    """G4: only such workers are left: the failure is loud, and says why."""
    body = generate(N, stream=stream, sampling={"stream_interval": 1}, **{f"return_{field}": True})
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), None]
    options = [WorkerOptions(**(BARE | {field: True})), WorkerOptions(**BARE)]
    async with world(plans=plans, options=options) as w:
        response = await w.ask(body)
        error = response.values()[-1]["error"] if stream else response.json()
        assert (error["reason"], error["delivered"]) == ("no_fit_worker", 3)
        assert f"w2: {field}" in error["message"]
        assert not response.complete or response.status >= 500
        assert w.workers[1].generates == []


@both
async def test_a_worker_that_does_not_say_is_refused_by_name(autojump_clock, stream):
    """An older release may have no such flag: nobody knows what its finish will have."""
    body = asked(stream, return_indexer_topk=False)
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), None]
    async with world(plans=plans, options=workers(2)) as w:
        silent = w.app.fleet.workers[1]
        w.workers[1].requests.clear()
        real = w.app._format.traits
        w.app._format.traits = lambda infos: replace(real(infos), routed_experts=None)
        silent.traits = replace(silent.traits, routed_experts=None)
        response = await w.ask(body)
        error = response.values()[-1]["error"] if stream else response.json()
        assert "w2: routed_experts" in error["message"]
        assert w.workers[1].generates == []


@both
async def test_if_nobody_has_them_the_engines_answer_is_the_clients(autojump_clock, stream):
    """Stock leaves the rows out, without a word; so it is before and after a cut."""
    body = asked(stream)
    for cuts in ([], [3]):
        response, row, _ = await answer_after(cuts, body, workers(len(cuts) + 1, **BARE), "cumulative")
        assert judged(response, body, Oracle(MODEL)) == []
        assert row["recomputed_rows"] == {}


@both
async def test_a_busy_worker_that_has_them_is_waited_for(autojump_clock, stream):
    """Its 503 is the client's: an answer without rows would not do."""
    plans = [FaultPlan.of(faults.Fault(faults.AT_HEAD, faults.status(503), faults.every)), None]
    async with world(plans=plans, options=[*workers(1), WorkerOptions(**BARE)]) as w:
        response = await w.ask(asked(stream))
        assert response.status == 503
        assert "reason" not in response.json(), "its own words, not ours"
        assert w.workers[1].generates == []


# -- a finish that was lost


@both
@dialects
@pytest.mark.parametrize("early", [False, True], ids=["stock", "early"])
async def test_a_lost_finish_has_its_rows(autojump_clock, stream, dialect, early):
    """All tokens are there, the finish is lost: the next worker is asked for rows, and generates nothing."""
    body = asked(stream, logprob_start_len=0)
    plan = FaultPlan.in_order([(faults.AFTER_LAST_TOKEN, CLOSE)])
    options = [replace(one, dialect=dialect) for one in workers(2, early_rows=early)]
    async with world(plans=[plan, None], options=options, policy="round_robin") as w:
        response = await w.ask(body)
        await w.quiet()
        plan.verify()
        [recorded] = w.workers[1].generates
        assert recorded.json()["sampling_params"]["max_new_tokens"] == 0
        answer = whole(response, stream, dialect)
        rows = wanted(body, [0 if early else 1] * (len(PROMPT) + N - 1))
        for field in FIELDS:
            assert DECODERS["slime"](answer, PROMPT, SHAPE, field) == rows[field]
        for field in FIELDS:
            del answer["meta_info"][field]
        clean = Oracle(MODEL).answer(body)
        assert differences(answer, clean) == []
        [row] = w.rows
        assert (row["outcome"], row["completion_tokens"]) == ("done", N)
        assert row["recomputed_rows"] == ({} if early else {field: [(0, len(PROMPT) + N - 1)] for field in FIELDS})


# -- what is wrong, and who sees it


def planted(answer, how):
    """One defect in the rows of an answer."""
    meta = answer["meta_info"]
    data, width = base64.b64decode(meta["routed_experts"]), 4 * SHAPE.width
    spoiled = {
        "a row too many": data + data[-width:],
        "a row too few": data[:-width],
        "the prompt's rows twice": data[: width * len(PROMPT)] + data,
        "another start": data[width * 2 :],
        "half a row": data[: -width // 2],
        "bytes": data[:-1],
        "none": b"",
    }[how]
    return {**answer, "meta_info": {**meta, "routed_experts": base64.b64encode(spoiled).decode()}}


#: Who sees it by its own rule: verl's looks at the width of rows alone, AReaL's at whether they divide.
SEEN = {
    "a row too many": {"slime", "miles", "areal"},
    "a row too few": {"slime", "miles", "areal"},
    "the prompt's rows twice": {"slime", "miles", "areal"},
    "another start": {"slime", "miles", "areal"},
    "half a row": {"slime", "miles", "areal", "verl"},
    "bytes": {"slime", "miles", "areal", "verl"},
    "none": {"slime", "miles", "verl"},
}


@pytest.mark.parametrize("how", SEEN)
def test_each_trainer_sees_what_its_rule_can(how):
    body = asked(stream=False)
    answer = Oracle(MODEL, routed_experts=True).answer(body)
    right = DECODERS["slime"](answer, PROMPT, SHAPE)
    seen = set()
    for name, decode in DECODERS.items():
        assert decode(answer, PROMPT, SHAPE) == right
        try:
            rows = decode(planted(answer, how), PROMPT, SHAPE)
        except Misread:
            seen.add(name)
        else:
            assert rows != right
    assert seen == SEEN[how]


def test_another_workers_row_has_the_right_shape():
    """G1: no rule of a trainer can see it; the marks of the tests above do."""
    body = asked(stream=False)
    mine, other = (Oracle(MODEL, routed_experts=True, expert_mark=mark).answer(body) for mark in MARKS[:2])
    for decode in DECODERS.values():
        assert decode(mine, PROMPT, SHAPE) != decode(other, PROMPT, SHAPE)
