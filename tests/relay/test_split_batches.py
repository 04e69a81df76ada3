"""With `--split-batches`: how the answers come together, and whose errors are whose."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from dyn_relay.formats.sglang.item import Item
from dyn_relay.relay.request import LogicalRequest
from dyn_testkit import faults
from dyn_testkit.client import fetch
from dyn_testkit.determinism import run_seeded
from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, KILL_WORKER, STALL, Fault, FaultPlan, abort_event, at_token, rid_begins, status
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE
from tests.relay.harness import world
from tests.relay.odd import scripted
from tests.relay.several import judged, several

both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
dialects = pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
SLOW = WorkerOptions(tick=1.0)


def shape(value: object) -> object:
    """Keys and their order, types of values."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    return type(value).__name__


@both
@dialects
@pytest.mark.parametrize("rid", [None, "job", ["x", "y", "z"]], ids=["no-rid", "string", "list"])
@pytest.mark.parametrize("n", [1, 2])
async def test_it_looks_as_the_engines_own(autojump_clock, stream, dialect, rid, n):
    """Keys in the engine's order, `index` where it puts it, one terminator, and rids as it gives them."""
    body = several(3, n, stream=stream, **({} if rid is None else {"rid": rid}))
    options = WorkerOptions(dialect=dialect, radix_cache=False)
    async with world(options=options, split_batches=True) as w:
        response = await w.ask(body)
        direct = await fetch(w.network, w.workers[0].url, "/generate", body)
        assert judged(response, body, ORACLE, dialect) == []
        assert judged(direct, body, ORACLE, dialect) == []
        ours, theirs = ((each.values() if stream else each.json()) for each in (response, direct))
        assert len(ours) == len(theirs)
        place = (lambda value: (value["index"], value["meta_info"]["completion_tokens"])) if stream else (lambda _: 0)
        assert [*map(shape, sorted(ours, key=place))] == [*map(shape, sorted(theirs, key=place))]
        assert response.header("x-dyn-relay-migratable") == "yes"
        assert response.header("content-type") == direct.header("content-type")
        if n > 1:
            assert all(len(value["meta_info"]["id"]) == 32 for value in (*ours, *theirs))
        await w.quiet()
        assert len(w.rows) == 3 * n
        assert {row["bundle"] for row in w.rows} == {rid} if isinstance(rid, str) else len({*map(str, w.rows)}) == 3 * n
        assert sorted(row["index"] for row in w.rows) == list(range(3 * n))
        assert w.metric('dyn_relay_http_requests_total{route="/generate",status_class="2xx"}') == 1
        assert w.metric('dyn_relay_requests_total{outcome="done"}') == 3 * n


async def test_each_item_is_an_attempt_of_its_own(autojump_clock):
    """Load is spread, and each item has its name: one that is a prefix of another's goes out under a fresh one."""
    body = {**several(1), "input_ids": [[at + 3] for at in range(12)], "rid": "job"}
    async with world(split_batches=True, plans=[None] * 4) as w:
        assert judged(await w.ask(body), body, ORACLE) == []
        assert [len(worker.generates) for worker in w.workers] == [3] * 4
        sent = [recorded.json() for worker in w.workers for recorded in worker.generates]
        names = [one["rid"] for one in sent]
        assert not any(other.startswith(name) for name in names for other in names if other is not name)
        assert {name for name in names if name.startswith("job")} >= {"job_0", "job_2", "job_9"}
        assert all(isinstance(one["input_ids"][0], int) for one in sent)


@both
async def test_lists_of_parameters_go_to_their_items(autojump_clock, stream):
    body = several(2, stream=stream, rid=["x", "y"], return_logprob=[True, False])
    body["sampling_params"] = [{**body["sampling_params"], "max_new_tokens": most} for most in (2, 6)]
    async with world(split_batches=True) as w:
        response = await w.ask(body)
        last = {}
        for value in response.values() if stream else response.json():
            last[value["meta_info"]["id"]] = value
        assert [len(last[rid]["output_ids"]) for rid in "xy"] == [2, 6]
        assert ["output_token_logprobs" in last[rid]["meta_info"] for rid in "xy"] == [True, False]


@both
async def test_seeded_samples_are_the_engines(autojump_clock, stream):
    """With a seed all samples are the same one, here as there; each is continued as itself."""
    body = several(1, 3, stream=stream)
    body["sampling_params"] |= {"temperature": 1.0, "sampling_seed": 11}
    plan = FaultPlan.of(Fault(at_token(2), CLOSE, faults.first(2)))
    async with world(plans=[plan, None], split_batches=True, policy="round_robin") as w:
        assert judged(await w.ask(body), body, ORACLE) == []
        assert plan.count() == 2


@pytest.mark.parametrize("first", ["cumulative", "incremental"])
@pytest.mark.parametrize("kills", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("more", [{}, {"return_logprob": True, "top_logprobs_num": 1}], ids=["ids", "logprobs"])
async def test_one_stream_has_one_dialect(autojump_clock, first, kills, more):
    """F3: workers of a mixed fleet each have their own; a client takes the last event of an item for all of it."""
    dialects = [first, *{"cumulative", "incremental"} - {first}]
    options = [WorkerOptions(dialect=dialect) for dialect in dialects * 2]
    plans = [FaultPlan.of(Fault(at_token(2), CLOSE, faults.first(1))) if kills else None] * 2
    async with world(plans=[*plans, None, None], options=options, split_batches=True, policy="round_robin") as w:
        body = several(2, 2, stream=True, **more)
        response = await w.ask(body)
        assert judged(response, body, ORACLE, first) == []
        assert all(worker.generates for worker in w.workers)


async def test_what_cannot_be_told_otherwise_goes_where_its_dialect_is_spoken(autojump_clock):
    options = [WorkerOptions(dialect=dialect) for dialect in ("incremental", "cumulative", "incremental")]
    body = several(4, stream=True)
    body["sampling_params"] |= {"frequency_penalty": 0.5}
    async with world(plans=[None] * 3, options=options, split_batches=True, policy="round_robin") as w:
        response = await w.ask(body)
        assert response.header("x-dyn-relay-migratable") == "no; reason=frequency_penalty"
        assert [len(worker.generates) for worker in w.workers] == [2, 0, 2]
        assert (
            sum(len(value["output_ids"]) for value in response.values())
            == 4 * body["sampling_params"]["max_new_tokens"]
        )


async def test_a_list_says_that_one_of_its_answers_crossed_versions(autojump_clock):
    """H3."""
    options = [WorkerOptions(weight_version=version) for version in "78"]
    body = several(2, stream=False)
    body["sampling_params"] |= {"stream_interval": 1}
    for plans, expected in (([FaultPlan.of(Fault(at_token(3), KILL_WORKER)), None], "yes"), ([None, None], None)):
        async with world(plans=plans, options=options, split_batches=True, policy="round_robin") as w:
            response = await w.ask(body)
            assert response.status == 200
            assert response.header("x-dyn-relay-crossed-versions") == expected


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_an_aborted_item_of_a_stream_is_an_event_of_it(autojump_clock):
    """As stock: the scheduler's refusal of one prompt is its own event; the others go on to the end."""
    model = Model(context_length=40)
    body = {**several(2), "input_ids": [[5, 6], [7] * 37], "rid": "job"}
    del body["sampling_params"]["max_new_tokens"]
    async with world(options=WorkerOptions(model=model), split_batches=True) as w:
        response = await w.ask(body)
        direct = await fetch(w.network, w.workers[0].url, "/generate", body)
        for each in (response, direct):
            assert each.complete
            assert each.events()[-1] == b"[DONE]"
            finishes = {
                value["index"]: value["meta_info"]["finish_reason"]
                for value in each.values()
                if value["meta_info"]["finish_reason"] is not None
            }
            assert finishes[0]["type"] == "length"
            assert (finishes[1]["type"], finishes[1]["status_code"]) == ("abort", 400)
        refused = [[value for value in each.values() if value["index"] == 1] for each in (response, direct)]
        assert [len(each) for each in refused] == [1, 1]
        assert shape(refused[0][0]) == shape(refused[1][0])
        await w.quiet()
        assert {row["index"]: row["outcome"] for row in w.rows} == {0: "done", 1: "engine_error"}


@pytest.mark.parametrize("prompt", [[7] * 37, [7] * 50], ids=["scheduler", "tokenizer"])
async def test_one_items_refusal_is_the_unary_answer(autojump_clock, prompt):
    """As stock: status and body of the first refusal, whatever the others would have said; these are given up."""
    model = Model(context_length=40)
    body = {**several(2, stream=False), "input_ids": [[5, 6], prompt], "rid": "job"}
    del body["sampling_params"]["max_new_tokens"]
    async with world(options=WorkerOptions(model=model, tick=1.0), split_batches=True) as w:
        response = await w.ask(body)
        direct = await fetch(w.network, w.workers[0].url, "/generate", body)
        assert (response.status, response.body) == (direct.status, direct.body)
        assert response.status == 400
        await w.quiet()
        assert {row["index"]: row["outcome"] for row in w.rows} == {0: "given_up", 1: "engine_error"}
        await until(lambda: not any(worker.live for worker in w.workers))


async def test_a_request_that_is_refused_outright_is_a_stream_of_one_error(autojump_clock):
    """As stock, byte for byte, if nothing was said before; else the stream breaks: stock would have said nothing."""
    body = {**several(2), "input_ids": [[5, 6], [7] * 50], "rid": "job"}
    del body["sampling_params"]["max_new_tokens"]
    slow, fast = WorkerOptions(model=Model(context_length=40), tick=1.0), WorkerOptions(model=Model(context_length=40))
    async with world(options=slow, split_batches=True) as w:
        response = await w.ask(body)
        direct = await fetch(w.network, w.workers[0].url, "/generate", body)
        assert response.complete
        assert response.body == direct.body
        assert response.body.endswith(b"data: [DONE]\n\n")
        await w.quiet()
        assert {row["index"]: row["outcome"] for row in w.rows} == {0: "given_up", 1: "engine_error"}
    held = Fault(faults.AT_HEAD, STALL, rid_begins("job_1"))
    plans = [FaultPlan.of(held) for _ in range(2)]
    async with world(plans=plans, options=fast, split_batches=True) as w, trio.open_nursery() as nursery:

        async def release() -> None:
            await until(lambda: any(row["index"] == 0 for row in w.rows))
            for plan in plans:
                plan.release()

        nursery.start_soon(release)
        response = await w.ask(body)
        assert not response.complete
        assert b"[DONE]" not in response.events()
        assert "longer than the model's context" in response.values()[-1]["error"]["message"]


async def test_an_error_in_the_midst_of_an_answer(autojump_clock):
    """An engine that gives tokens and an error object in one breath: both are passed on, and the stream breaks."""
    token = {"output_ids": [9], "meta_info": {"id": "job_0", "completion_tokens": 1, "prompt_tokens": 3}}
    error = {"error": {"message": "no more", "code": 400}}
    events = b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in (token, error))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    async with world(plans=[], split_batches=True) as w:
        await scripted(w, head + events)
        response = await w.ask(several(1, rid="job"))
        assert response.values() == [{**token, "index": 0}, error]
        assert b"[DONE]" not in response.events()
        assert not response.complete


@both
@pytest.mark.parametrize("limit", [0, 3])
async def test_all_fail_at_once(autojump_clock, stream, limit):
    """Their only worker dies: one error, not one from each."""
    plan = FaultPlan.of(Fault(at_token(2), KILL_WORKER))
    async with world(plans=[plan], options=SLOW, split_batches=True, migration_limit=limit) as w:
        response = await w.ask(several(4, 2, stream=stream))
        if stream:
            assert ["error" in value for value in response.values()].count(True) == 1
            assert "error" in response.values()[-1]
            assert not response.complete
        else:
            assert response.status in (502, 503)
        await w.quiet()
        assert len(w.rows) == 8


@both
async def test_an_item_that_fails_before_its_first_token(autojump_clock, stream):
    """When others have begun: it is too late for a status."""
    stall = Fault(faults.AT_HEAD, STALL, lambda seen: b"[8, 9]" in seen.body)
    plans = [FaultPlan.of(stall) for _ in range(2)]
    body = several(2, stream=stream, rid="job", tokens=50)
    async with world(plans=plans, options=SLOW, split_batches=True, migration_limit=1, first_token_timeout_secs=5) as w:
        response = await w.ask(body)
        if stream:
            assert (response.values()[-1]["index"], response.values()[-1]["error"]["code"]) == (1, 504)
            assert {value["index"] for value in response.values()[:-1]} == {0}
            assert b"HTTP/1.1" not in response.body
            assert not response.complete
        else:
            assert (response.status, response.json()["index"]) == (504, 1)


@pytest.mark.parametrize("answer", [b'{"output_ids":[1]}', b""], ids=["json", "nothing"])
async def test_what_is_no_stream_is_no_part_of_one(autojump_clock, answer):
    """An item that is only forwarded: its worker answers whole, or with a terminator alone. Neither passes for one."""
    kind, body = (b"application/json", answer) if answer else (b"text/event-stream", b"data: [DONE]\n\n")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
    async with world(plans=[], split_batches=True) as w:
        await scripted(w, head + body)
        one = several(1, rid="job")
        one["sampling_params"] |= {"frequency_penalty": 0.5}
        response = await w.ask(one)
        assert response.status == 502
        assert response.json()["object"] == "error"
        assert response.json()["index"] == 0


@both
async def test_a_defect_of_ours_is_loud(autojump_clock, stream, monkeypatch):
    """The list is not made shorter, nor the stream ended, by an exception that should not be."""
    feed = Item.feed

    def broken(self, events, now):
        if self.rid == "job_1" and self.delivered > 1:
            raise RuntimeError("a defect")
        return feed(self, events, now)

    monkeypatch.setattr(Item, "feed", broken)
    async with world(options=SLOW, split_batches=True) as w:
        response = await w.ask(several(2, stream=stream, rid="job"))
        assert (response.status, response.complete) == ((200, False) if stream else (500, True))
        assert b"[DONE]" not in response.body
        await w.quiet()
        assert {row["index"]: row["error"] for row in w.rows} == {0: "", 1: "internal_error"}


async def test_the_header_speaks_for_items_that_still_wait(autojump_clock, monkeypatch):
    """One that has no worker yet (a suspect that waits for its turn, say) is judged all the same."""
    enter = LogicalRequest._enter

    async def slowly(self):
        if self.record.index == 1:
            await trio.sleep(30)
        await enter(self)

    monkeypatch.setattr(LogicalRequest, "_enter", slowly)
    body = several(2, rid="job")
    body["sampling_params"] = [body["sampling_params"], {**body["sampling_params"], "frequency_penalty": 0.5}]
    async with world(split_batches=True) as w:
        response = await w.ask(body)
        assert response.header("x-dyn-relay-migratable") == "no; reason=frequency_penalty"
        assert {value["index"] for value in response.values()} == {0, 1}


@pytest.mark.parametrize("seed", range(40))
def test_an_error_is_the_last_word(seed):
    """Whatever the other items have to say at that moment."""

    async def main() -> None:
        model = Model(context_length=400)
        refused = {**several(5, tokens=300), "input_ids": [[5], [6], [7] * 500, [8], [9]], "rid": "job"}
        async with world(options=WorkerOptions(model=model), split_batches=True) as w:
            response = await w.ask(refused)
            *before, error = [event for event in response.events() if event != b"[DONE]"]
            assert b"longer than the model's context" in error
            assert response.complete is not bool(before)
        fault = Fault(at_token(seed + 1), CLOSE, rid_begins("job_2"))
        plans = [FaultPlan.of(fault) for _ in range(2)]
        async with world(plans=plans, split_batches=True, migration_limit=0) as w:
            response = await w.ask(several(5, tokens=300, rid="job"))
            assert response.values()[-1]["error"]["reason"] == "migration_limit"
            assert not response.complete
            await w.quiet()
            assert {row["outcome"] for row in w.rows} <= {"failed", "given_up", "done"}
            assert [row["index"] for row in w.rows if row["outcome"] == "failed"] == [2]
        short = {**refused, "sampling_params": {**refused["sampling_params"], "max_new_tokens": 1}}
        async with world(options=WorkerOptions(model=model), split_batches=True) as w:
            await w.ask(short)
            await w.quiet()
            outcomes = {row["index"]: row["outcome"] for row in w.rows}
            assert outcomes.pop(2) == "engine_error"
            assert set(outcomes.values()) <= {"given_up", "done"}

    run_seeded(main, seed)


@both
async def test_an_item_that_fails_is_loud(autojump_clock, stream):
    """N6, law 8: nobody can continue it: an error that names it, never a shorter list; the others are told to stop."""
    fault = Fault(at_token(2), CLOSE, rid_begins("job_1"))
    plans = [FaultPlan.of(fault) for _ in range(2)]
    body = several(3, stream=stream, rid="job", tokens=50)
    async with world(plans=plans, options=SLOW, split_batches=True, migration_limit=0) as w:
        response = await w.ask(body)
        assert response.header("x-dyn-relay-migratable") == "no; reason=migration_limit"
        if stream:
            assert (response.status, response.complete) == (200, False)
            assert b"[DONE]" not in response.events()
            said = response.values()[-1]
            assert (said["index"], said["error"]["reason"], said["error"]["delivered"]) == (1, "migration_limit", 2)
        else:
            assert (response.status, response.complete) == (502, True)
            assert (response.json()["index"], response.json()["reason"]) == (1, "migration_limit")
        await w.quiet()
        outcomes = {row["index"]: (row["outcome"], row["closed_by"]) for row in w.rows}
        assert outcomes == {0: ("given_up", "proxy"), 1: ("failed", "proxy"), 2: ("given_up", "proxy")}
        await until(lambda: not any(worker.live for worker in w.workers))
        assert trio.current_time() < 20  # they were not run to their end


@both
async def test_what_is_not_migratable_is_split_as_well(autojump_clock, stream):
    """The header has the first item's reason; a cut of that one fails the whole, a cut of another does not."""
    body = several(2, stream=stream, rid="job")
    params = body["sampling_params"]
    body["sampling_params"] = [{**params, "frequency_penalty": 0.5}, params]
    for item in (0, 1):
        plans = [FaultPlan.of(Fault(at_token(0 if not stream else 2), CLOSE, rid_begins(f"job_{item}"))) for _ in "ab"]
        async with world(plans=plans, split_batches=True) as w:
            response = await w.ask(body)
            assert response.header("x-dyn-relay-migratable") == "no; reason=frequency_penalty"
            assert sum(plan.count() for plan in plans) == 1
            assert response.complete is (item == 1 or not stream)
            assert response.status == (200 if stream or item == 1 else 502)


@both
@pytest.mark.parametrize(("what", "code"), [(status(503), 503), (abort_event(500), 500)])
async def test_an_engines_own_failure_that_nobody_does_better(autojump_clock, stream, what, code):
    """A status is the whole's answer; an abort in a stream is its item's, as stock sends it."""
    place = faults.AT_HEAD if what.kind is faults.Kind.STATUS else at_token(0)
    plans = [FaultPlan.of(Fault(place, what)) for _ in range(2)]
    body = several(2, stream=stream, rid="job")
    async with world(plans=plans, options=SLOW, split_batches=True, migration_limit=1) as w:
        response = await w.ask(body)
        if stream and what.kind is faults.Kind.ABORT_EVENT:
            finishes = [value["meta_info"]["finish_reason"] for value in response.values()]
            assert response.events()[-1] == b"[DONE]"
            assert [finish["status_code"] for finish in finishes] == [500, 500]
            assert sorted(value["index"] for value in response.values()) == [0, 1]
        else:
            assert (response.status, response.complete) == (code, True)


async def test_without_a_worker(autojump_clock):
    async with world(plans=[], split_batches=True) as w:
        for stream in (True, False):
            response = await w.ask(several(2, stream=stream))
            assert (response.status, response.json()["reason"]) == (503, "no_worker")
        await w.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_live_rid_is_a_duplicate(autojump_clock, stream):
    """C4: of an item, too; nobody sees the second request."""
    body = several(2, stream=stream, rid="job")
    async with world(options=SLOW, split_batches=True) as w, trio.open_nursery() as nursery:
        nursery.start_soon(w.ask, body)
        await until(lambda: len(w.app.live) == 2)
        response = await w.ask({**several(1, stream=stream), "input_ids": [5], "rid": "job_1"})
        assert b"Duplicate request ID detected: job_1" in response.body
        response = await w.ask(body)
        assert b"Duplicate request ID detected: job_0" in response.body
        response = await w.ask({**body, "rid": ["new", "job_1"]})
        assert b"Duplicate request ID detected: job_1" in response.body
        assert sum(len(worker.generates) for worker in w.workers) == 2
