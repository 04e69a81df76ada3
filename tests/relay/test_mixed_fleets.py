"""Workers that are not alike: who gets a request, and what is said if nobody has what it asks for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import trio

from dyn_relay.formats.traits import UNKNOWN
from dyn_relay.relay.candidates import Candidates
from dyn_testkit import faults
from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, FaultPlan, at_token
from dyn_testkit.tokenizer import BYTE_LEVEL
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
BARE = WorkerOptions()
TEXT = WorkerOptions(skip_tokenizer_init=False)
SHORT = WorkerOptions(model=Model(context_length=64))
BY_TEXT = {"input_ids": None, "text": "abc"}

#: What needs a tokenizer: by itself, a worker without one says 400 to it (of a grammar, that it has no backend).
SPELLED = {
    "a text prompt": BY_TEXT,
    "text prompts": {"input_ids": None, "text": ["abc", "abd"]},
    "a stop string": {"sampling_params": {"max_new_tokens": 5, "stop": "never said"}},
    "a stop regex": {"sampling_params": {"max_new_tokens": 5, "stop_regex": "never"}},
    "a least": {"sampling_params": {"max_new_tokens": 5, "min_new_tokens": 2}},
    "a grammar": {"sampling_params": {"max_new_tokens": 5, "regex": "a+"}},
}


def asked(stream, **more):
    return {**generate(5, stream=stream), **more}


def said(response):
    """The text of the whole answer."""
    assert response.complete
    values = response.values() if response.header("content-type").startswith("text/event-stream") else [response.json()]
    assert values[-1]["meta_info"]["finish_reason"]["type"] == "length"
    return values[-1]["text"]


async def served_by(options, body, **config):
    """Which workers were asked, over several rounds of the policy, and the last answer."""
    asked_workers = set()
    async with world(plans=[None] * len(options), options=options, policy="round_robin", **config) as w:
        for _ in range(2 * len(options)):
            response = await w.ask(body)
        asked_workers = {at for at, worker in enumerate(w.workers) if worker.generates}
        return asked_workers, response


@both
@pytest.mark.parametrize("what", SPELLED)
async def test_what_is_spelled_goes_to_a_tokenizer(autojump_clock, stream, what):
    asked_workers, response = await served_by([BARE, TEXT, BARE, TEXT], asked(stream, **SPELLED[what]))
    assert asked_workers == {1, 3}
    assert response.status == 200


@both
async def test_what_ends_an_answer_is_learnt_of_workers_that_are_alike(autojump_clock, stream):
    """A tokenizer has an EOS of its own, 9 here; to a worker without one 9 is a token like any other."""
    bare = Model(eos_token_ids=(2,), recites=(5, 6, 7, 20, 21, 9, 30, 31, 32, 33, 34, 35))
    model = replace(bare, eos_token_ids=(2, 9))
    spelling = WorkerOptions(model=model, skip_tokenizer_init=False, tokenizer=BYTE_LEVEL)
    plans = [None, FaultPlan.in_order([(at_token(3), CLOSE)]), None]
    body = generate(8, stream=stream, input_ids=[5, 6, 7])
    body["sampling_params"] |= {"ignore_eos": False, "stream_interval": 1}
    options = [spelling, *[WorkerOptions(model=bare)] * 2]
    async with world(plans=plans, options=options, policy="round_robin") as w:
        first, second = [await w.ask(body) for _ in range(2)]
        values = [response.values()[-1] if stream else response.json() for response in (first, second)]
        assert values[0]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 9}
        assert values[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
        assert values[1]["output_ids"] == [20, 21, 9, 30, 31, 32, 33, 34]
        assert [len(worker.generates) for worker in w.workers] == [1, 1, 1]


@both
async def test_what_is_not_goes_anywhere(autojump_clock, stream):
    asked_workers, _ = await served_by([BARE, TEXT, BARE], asked(stream))
    assert asked_workers == {0, 1, 2}


@both
async def test_if_there_is_none_the_engine_says_so(autojump_clock, stream):
    _, response = await served_by([BARE, BARE], asked(stream, **BY_TEXT))
    error = response.values()[0]["error"] if stream else response.json()["error"]
    assert response.status == (200 if stream else 400)
    assert "skip_tokenizer_init=True cannot accept text prompts" in error["message"]


@both
async def test_a_long_request_goes_where_it_has_room(autojump_clock, stream):
    for body in (asked(stream, input_ids=[5] * 60), generate(80, stream=stream)):
        asked_workers, response = await served_by([SHORT, BARE, SHORT], body)
        assert asked_workers == {1}
        assert judged(response, body, ORACLE) == []
    asked_workers, _ = await served_by([SHORT, BARE, SHORT], asked(stream))
    assert asked_workers == {0, 1, 2}


@both
async def test_too_long_for_all_is_the_engines_word(autojump_clock, stream):
    _, response = await served_by([SHORT, SHORT], generate(80, stream=stream))
    error = response.values()[0]["error"] if stream else response.json()["error"]
    assert "exceeds the model's maximum context length of 64 tokens" in error["message"]


@both
async def test_a_worker_with_unknown_traits_is_asked_last(autojump_clock, stream):
    """It has not said that it has a tokenizer; while another has, that one is asked, and then nobody is worse off."""
    async with world(plans=[None, None], options=[TEXT, TEXT], policy="round_robin") as w:
        w.app.fleet.workers[0].traits = replace(w.app.fleet.workers[0].traits, text=None)
        for _ in range(3):
            await w.ask(asked(stream, **BY_TEXT))
        assert [len(worker.generates) for worker in w.workers] == [0, 3]
        w.app.fleet.workers[1].traits = replace(w.app.fleet.workers[1].traits, text=None)
        assert (await w.ask(asked(stream, **BY_TEXT))).status == 200


@both
async def test_a_draining_worker_is_nobodys_hope(autojump_clock, stream):
    """The only one with a tokenizer leaves: the others answer in their own words."""
    options = [BARE, replace(TEXT, tick=1.0)]
    async with world(plans=[None, None], options=options) as w, trio.open_nursery() as clients:
        clients.start_soon(w.ask, asked(True, **BY_TEXT))
        await w.workers[1].reaches(requests=len(w.workers[1].requests) + 1)
        w.app.fleet.remove("w2")
        assert [worker.state for worker in w.app.fleet.workers] == ["ready", "draining"]
        response = await w.ask(asked(stream, **BY_TEXT))
        assert len(w.workers[0].generates) == 1
        assert response.status == (200 if stream else 400)


@both
async def test_a_worker_that_was_never_asked_is_no_answer(autojump_clock, stream):
    """The only one with a tokenizer refuses connections: the failure is loud, and not another one's 400."""
    async with world(plans=[None, None], options=[BARE, TEXT]) as w:
        w.workers[1].kill()
        response = await w.ask(asked(stream, **BY_TEXT))
        assert (response.status, response.json()["reason"]) == (503, "no_survivor")
        assert response.json()["message"].endswith("; no other worker has all that is asked for (w1: tokenizer)")
        assert w.workers[0].generates == []


@both
async def test_who_was_passed_over_is_named_after_a_cut_too(autojump_clock, stream):
    """Nothing was delivered: the other one may take it, but has not what is asked for."""
    plans = [FaultPlan.of(faults.Fault(faults.AT_HEAD, faults.KILL_WORKER, faults.first(1))), None]
    options = [WorkerOptions(routed_experts=True), BARE]
    async with world(plans=plans, options=options, policy="round_robin") as w:
        response = await w.ask(asked(stream, return_routed_experts=True))
        said = response.values()[-1]["error"] if response.status == 200 else response.json()
        assert said["reason"] == "no_fit_worker"
        assert "(w2: routed_experts)" in said["message"]
        assert w.workers[1].generates == []


def test_who_was_tried_was_not_passed_over():
    """`Candidates` alone: of those that are excluded nothing is said."""

    class Anything:
        started_work = True
        staying: ClassVar = [SimpleNamespace(id=name, traits=UNKNOWN, part="regular") for name in ("w1", "w2")]

        def unfit(self, traits):
            return "model"

        lacks = unfit

    anything = Anything()
    candidates = Candidates(anything, anything, anything, "regular")
    assert candidates.unfit(()) == {"w1": "model", "w2": "model"}
    assert candidates.unfit({"w1"}) == {"w2": "model"}


@both
async def test_a_continuation_needs_what_the_request_needs(autojump_clock, stream):
    """The survivor with more room is taken, not the one that would end the answer early."""
    plans = [FaultPlan.in_order([(at_token(3), CLOSE)]), None, None]
    body = generate(60, stream=stream, sampling={"stream_interval": 1})
    async with world(plans=plans, options=[BARE, SHORT, BARE], policy="round_robin") as w:
        assert judged(await w.ask(body), body, ORACLE) == []
        assert [len(worker.generates) for worker in w.workers] == [1, 0, 1]


OTHERS = {
    "model": WorkerOptions(model=Model(vocab_size=4096), model_path="other/model"),
    "preferred_sampling_params": WorkerOptions(preferred_sampling_params={"stop_token_ids": [1, 2, 3]}),
}
SILENT = WorkerOptions(infos=False)


@both
@pytest.mark.parametrize("silent_first", [True, False], ids=["silent-first", "silent-second"])
@pytest.mark.parametrize("lacks", OTHERS)
async def test_what_is_not_known_to_be_the_same_does_not_go_on(autojump_clock, stream, lacks, silent_first):
    """Of the two workers one does not say what it is: it may be another model, or have other defaults."""
    plans = [FaultPlan.in_order([(at_token(3), CLOSE)]), None]
    options = [SILENT, OTHERS[lacks]] if silent_first else [OTHERS[lacks], SILENT]
    async with world(plans=plans, options=options, policy="round_robin") as w:
        response = await w.ask(generate(5, stream=stream, sampling={"stream_interval": 1}))
        assert response.complete
        assert [len(worker.generates) for worker in w.workers] == [2, 0], "the first, which lives, goes on itself"


@both
async def test_what_the_first_worker_says_late_counts(autojump_clock, stream):
    """The request was there before the infos of its worker were read; that they are read by now spoils nothing."""
    plans = [FaultPlan.in_order([(at_token(3), CLOSE)])]
    body = generate(5, stream=stream, sampling={"stream_interval": 1})
    async with world(plans=plans) as w:
        [worker] = w.app.fleet.workers
        worker.traits, worker.learnt = UNKNOWN, False
        assert judged(await w.ask(body), body, ORACLE) == []
        assert worker.traits.model == "mock/model"
        assert len(w.workers[0].generates) == 2


@both
async def test_a_worker_that_has_just_joined_is_asked_what_it_is_first(autojump_clock, stream):
    """The proxy's first requests come before its first probes are over: they are protected as any other."""
    plans = [FaultPlan.in_order([(at_token(3), CLOSE)]), None]
    body = asked(stream, **BY_TEXT)
    async with world(plans=plans, options=[TEXT, TEXT], policy="round_robin") as w:
        for worker in w.app.fleet.workers:
            worker.traits, worker.learnt = UNKNOWN, False
        cut = await w.ask(body)
        assert cut.header("x-dyn-relay-migratable") == "yes"
        uncut = await w.ask(body)
        assert said(cut) == said(uncut)
        assert sum(len(worker.generates) for worker in w.workers) == 3


@both
async def test_a_worker_that_does_not_say_what_it_is_is_asked_once(autojump_clock, stream):
    """It has no infos: the second request does not wait for them."""
    async with world(plans=[None], options=[SILENT]) as w:
        [worker], [engine] = w.app.fleet.workers, w.workers
        worker.learnt = False
        before = len(engine.requests)
        for _ in range(3):
            assert (await w.ask(generate(5, stream=stream))).status == 200
        paths = [one.path for one in engine.requests[before:]]
        assert paths == ["/model_info", "/server_info", "/generate", "/generate", "/generate"]


@both
async def test_workers_that_all_say_nothing_are_alike(autojump_clock, stream):
    """A fleet of an old release goes on as before."""
    plans = [FaultPlan.in_order([(at_token(3), CLOSE)]), None]
    body = generate(5, stream=stream, sampling={"stream_interval": 1})
    async with world(plans=plans, options=[SILENT, SILENT], policy="round_robin") as w:
        assert judged(await w.ask(body), body, ORACLE) == []
        assert [len(worker.generates) for worker in w.workers] == [1, 1]


async def test_what_workers_say_is_shown(autojump_clock):
    options = [WorkerOptions(skip_tokenizer_init=False, routed_experts=True, deterministic=False), SILENT]
    async with world(plans=[None, None], options=options) as w:
        listed = (await w.ask(None, "/workers", method="GET")).json()["workers"]
        first, second = [one["traits"] for one in listed]
        assert (first["text"], first["routed_experts"], first["deterministic"]) == (True, True, False)
        assert (first["incremental"], first["indexer_topk"], first["sampling_defaults"]) == (False, False, {})
        assert set(second.values()) == {None}


@both
async def test_bridged_requests_need_nothing(autojump_clock, stream):
    async with world(plans=[None, None], options=[BARE, TEXT], policy="round_robin") as w:
        for _ in range(2):
            assert (await w.ask(None, "/v1/models", method="GET")).status == 200
        assert all(any(one.path == "/v1/models" for one in worker.requests) for worker in w.workers)


@both
async def test_suspects_are_tried_where_they_belong(autojump_clock, stream):
    """A worker died under it before its first token; the one that tries it alone must have what it asks for."""
    plans = [FaultPlan.of(faults.Fault(faults.AT_HEAD, faults.KILL_WORKER, faults.first(1))), None, None]
    async with world(plans=plans, options=[TEXT, BARE, TEXT], policy="round_robin") as w:
        response = await w.ask(asked(stream, **BY_TEXT))
        assert response.status == 200
        assert [len(worker.generates) for worker in w.workers] == [1, 0, 1]
