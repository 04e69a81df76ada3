"""H2, H3, H4, H7: what weights may continue an answer, and what says that they were others."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit.faults import AFTER_LAST_TOKEN, CLOSE, KILL_WORKER, FaultPlan, at_token
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import world

N, K = 8, 3
CROSSED = "x-dyn-relay-crossed-versions"
both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


def asked(stream):
    return generate(N, stream=stream, sampling={"stream_interval": 1})


def versions(*names):
    return [WorkerOptions(weight_version=name) for name in names]


def dying(*, survivors):
    return [FaultPlan.in_order([(at_token(K), KILL_WORKER)]), *[None] * survivors]


def tokens_of(response, stream):
    return (response.values()[-1] if stream else response.json())["output_ids"]


@both
@pytest.mark.parametrize(
    ("policy", "others", "chosen"),
    [
        ("any", ("8", "7"), 1),
        ("same", ("8", "7"), 2),
        ("same", ("8", "6", "7"), 3),
        ("max-lag=1", ("9", "default", "8"), 3),
        ("max-lag=2", ("10", "9"), 2),
    ],
)
async def test_who_may_continue(autojump_clock, stream, policy, others, chosen):
    plans = dying(survivors=len(others))
    options = versions("7", *others)
    async with world(plans=plans, options=options, policy="round_robin", weight_version_policy=policy) as w:
        response = await w.ask(asked(stream))
        assert tokens_of(response, stream) == ORACLE.answer(asked(stream))["output_ids"]
        assert [at for at, worker in enumerate(w.workers) if worker.generates] == [0, chosen]


@both
@pytest.mark.parametrize(
    ("policy", "other"), [("same", "8"), ("max-lag=1", "9"), ("max-lag=3", "default"), ("same", "default")]
)
async def test_nobody_fits(autojump_clock, stream, policy, other):
    """Loud, and the policy is named."""
    async with world(plans=dying(survivors=1), options=versions("7", other), weight_version_policy=policy) as w:
        response = await w.ask(asked(stream))
        error = response.values()[-1]["error"] if stream else response.json()
        assert (error["reason"], error["delivered"]) == ("no_fit_worker", K)
        assert f"w2: weight_version {other}, by --weight-version-policy {policy}" in error["message"]
        assert w.workers[1].generates == []
        assert stream != response.complete


@both
async def test_what_the_worker_does_counts_not_what_it_said(autojump_clock, stream):
    """Its weights were updated after its infos were read: its first event shows them, and is not taken."""
    plans = dying(survivors=2)
    async with world(
        plans=plans, options=versions("7", "7", "7"), policy="round_robin", weight_version_policy="same"
    ) as w:
        w.workers[1].scheduler.weight_version = "8"
        response = await w.ask(asked(stream))
        meta = (response.values()[-1] if stream else response.json())["meta_info"]
        assert tokens_of(response, stream) == ORACLE.answer(asked(stream))["output_ids"]
        assert meta["weight_versions"] == [{"version": "7", "start": 0, "end": N}]
        await w.quiet()
        assert [len(worker.generates) for worker in w.workers] == [1, 1, 1]
        [row] = w.rows
        assert [attempt["cause"] for attempt in row["attempts"]] == ["cut", "unfit", None]
        assert [attempt["tokens"] for attempt in row["attempts"]] == [K, 0, N - K]
        assert w.app.fleet.workers[1].state == "ready", "it is none the worse for it"
        assert not w.workers[1].live, "and does not go on"


@both
async def test_if_all_have_moved_on_it_is_said(autojump_clock, stream):
    options = versions("7", "7")
    async with world(plans=dying(survivors=1), options=options, weight_version_policy="same") as w:
        w.workers[1].scheduler.weight_version = "8"
        response = await w.ask(asked(stream))
        error = response.values()[-1]["error"] if stream else response.json()
        assert "weight_version 8, by --weight-version-policy same" in error["message"]
        assert error["delivered"] == K


@both
async def test_before_nobody_fits_infos_are_read_again(autojump_clock, stream):
    """It said 6 when it was asked last, and has 7 by now."""
    options = versions("7", "6")
    async with world(plans=dying(survivors=1), options=options, weight_version_policy="same") as w:
        w.workers[1].scheduler.weight_version = "7"
        response = await w.ask(asked(stream))
        assert tokens_of(response, stream) == ORACLE.answer(asked(stream))["output_ids"]
        assert len(w.workers[1].generates) == 1


async def test_a_hundred_cuts_read_them_once(autojump_clock):
    """The worker of many streams dies: its survivors are not asked by each of them."""
    options = [WorkerOptions(weight_version=version, tick=1.0) for version in ("7", "6")]
    async with world(options=options, weight_version_policy="same", policy="round_robin") as w:
        async with trio.open_nursery() as clients:
            for _ in range(100):
                clients.start_soon(w.ask, generate(N))
            await w.workers[0].reaches(requests=50)
            await trio.sleep(3)
            before = [recorded.path for recorded in w.workers[1].requests].count("/model_info")
            w.workers[0].kill()
        await w.quiet()
        assert [row["error"] for row in w.rows].count("no_fit_worker") == 50
        assert [recorded.path for recorded in w.workers[1].requests].count("/model_info") == before + 1


@both
async def test_nothing_delivered_may_begin_anywhere(autojump_clock, stream):
    plans = [FaultPlan.in_order([(at_token(0), CLOSE)]), None]
    async with world(plans=plans, options=versions("7", "8"), policy="round_robin", weight_version_policy="same") as w:
        response = await w.ask(asked(stream))
        assert tokens_of(response, stream) == ORACLE.answer(asked(stream))["output_ids"]
        assert response.header(CROSSED) is None
        assert len(w.workers[1].generates) == 1


@both
async def test_an_answer_that_crosses_says_so(autojump_clock, stream):
    """The row always; a header where the head is not out yet."""
    for other, crosses in (("8", True), ("7", False)):
        async with world(plans=dying(survivors=1), options=versions("7", other), policy="round_robin") as w:
            response = await w.ask(asked(stream))
            await w.quiet()
            assert [row["crossed_versions"] for row in w.rows] == [crosses]
            assert response.header(CROSSED) == ("yes" if crosses and not stream else None)


async def test_an_update_in_place_crosses_too(autojump_clock):
    """One attempt, one event: the engine's own spans say that there were two."""
    options = WorkerOptions(weight_version="7", tick=1.0)
    async with world(plans=[None], options=options) as w:
        answers = []

        async def client():
            answers.append(await w.ask(generate(N, stream=False, sampling={"stream_interval": 100})))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            await trio.sleep(4.5)
            w.workers[0].scheduler.weight_version = "8"
        [response] = answers
        assert len(response.json()["meta_info"]["weight_versions"]) == 2
        assert response.header(CROSSED) == "yes"
        await w.quiet()
        assert [row["crossed_versions"] for row in w.rows] == [True]


@both
async def test_a_multimodal_request_never_crosses(autojump_clock, stream):
    """H7: it is not continued at all, whatever the weights."""
    body = {**asked(stream), "image_data": ["http://x/y.png"]}
    async with world(plans=dying(survivors=1), options=versions("7", "8"), policy="round_robin") as w:
        response = await w.ask(body)
        assert response.header("x-dyn-relay-migratable") == "no; reason=image_data"
        assert response.status == 502 or not response.complete
        assert w.workers[1].generates == []
        await w.quiet()
        assert [row["crossed_versions"] for row in w.rows] == [False if stream else None]


UNTOLD = WorkerOptions(tells_versions=False)


@both
@pytest.mark.parametrize("policy", ["same", "max-lag=1"])
async def test_an_untold_version_is_followed_by_none(autojump_clock, stream, policy):
    """The first worker did not tell what made its tokens: nobody's weights can be said to fit."""
    options = [UNTOLD, *versions("9", "default")]
    async with world(
        plans=dying(survivors=2), options=options, policy="round_robin", weight_version_policy=policy
    ) as w:
        response = await w.ask(asked(stream))
        error = response.values()[-1]["error"] if stream else response.json()
        assert (error["reason"], error["delivered"]) == ("no_fit_worker", K)
        assert [len(worker.generates) for worker in w.workers] == [1, 0, 0]


@both
@pytest.mark.parametrize(
    ("names", "crosses"),
    [((None, "8", "9"), True), (("7", None, "9"), True), (("7", None, "7"), None), ((None, None, "9"), None)],
)
async def test_spans_with_a_hole_are_left_out(autojump_clock, stream, names, crosses):
    plans = [*[FaultPlan.in_order([(at_token(k), KILL_WORKER)]) for k in (3, 2)], None]
    options = [UNTOLD if name is None else WorkerOptions(weight_version=name) for name in names]
    async with world(plans=plans, options=options, policy="round_robin") as w:
        response = await w.ask(asked(stream))
        assert tokens_of(response, stream) == ORACLE.answer(asked(stream))["output_ids"]
        meta = (response.values()[-1] if stream else response.json())["meta_info"]
        assert meta["weight_version"] == names[-1]
        assert "weight_versions" not in meta
        await w.quiet()
        assert [row["crossed_versions"] for row in w.rows] == [crosses]


@both
async def test_a_finish_made_here_has_no_hole_either(autojump_clock, stream):
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), FaultPlan.in_order([(AFTER_LAST_TOKEN, CLOSE)])]
    options = [UNTOLD, WorkerOptions(weight_version="9", late_finish=True)]
    async with world(plans=plans, options=options, policy="round_robin") as w:
        response = await w.ask(asked(stream))
        meta = (response.values()[-1] if stream else response.json())["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": N}
        assert "weight_versions" not in meta
        await w.quiet()
        assert [row["outcome"] for row in w.rows] == ["completed_here"]


@both
async def test_rows_alone_are_asked_of_weights_that_fit(autojump_clock, stream):
    """The finish is lost, its rows are owed, and the next worker's weights are newer than it said."""
    plans = [FaultPlan.in_order([(AFTER_LAST_TOKEN, CLOSE)]), None]
    options = [WorkerOptions(weight_version="7", routed_experts=True, late_finish=True)] * 2
    async with world(plans=plans, options=options, policy="round_robin", weight_version_policy="same") as w:
        w.workers[1].scheduler.weight_version = "8"
        body = {**asked(stream), "return_routed_experts": True}
        response = await w.ask(body)
        assert "routed_experts" in (response.values()[-1] if stream else response.json())["meta_info"]
        await w.quiet()
        attempts = [(attempt["worker"], attempt["cause"]) for attempt in w.rows[0]["attempts"]]
        assert attempts == [("w1", "cut"), ("w2", "unfit"), ("w1", None)]


@both
@pytest.mark.parametrize("sampling", [{"frequency_penalty": 0.5}, {"n": 2}], ids=["penalty", "n"])
async def test_an_unprotected_answer_that_crosses(autojump_clock, stream, sampling):
    """Where it is read the row says so; a whole list is not read."""
    async with world(plans=[None], options=WorkerOptions(weight_version="7", tick=1.0)) as w:
        answers = []

        async def client():
            answers.append(await w.ask(generate(N, stream=stream, sampling=sampling)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            await trio.sleep(4.5)
            w.workers[0].scheduler.weight_version = "8"
        await w.quiet()
        unread = "n" in sampling and not stream
        assert [row["crossed_versions"] for row in w.rows] == [None if unread else True]
        assert answers[0].header(CROSSED) == ("yes" if not stream and not unread else None)


async def test_samples_of_one_version_each_do_not_cross(autojump_clock):
    async with world(plans=[None], options=WorkerOptions(weight_version="7")) as w:
        await w.ask(generate(N, sampling={"n": 2}))
        await w.quiet()
        assert [row["crossed_versions"] for row in w.rows] == [False]
