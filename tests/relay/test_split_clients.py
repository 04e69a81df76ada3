"""With `--split-batches`: who may end what, clients that read late or leave, and deadlines."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from dyn_relay.relay.split import SplitRequest
from dyn_testkit import faults
from dyn_testkit.client import begin
from dyn_testkit.faults import CLOSE, KILL_WORKER, STALL, Fault, FaultPlan, at_token, rid_begins
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE
from tests.relay.harness import world
from tests.relay.several import TOKENS, judged, several

both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
SLOW = WorkerOptions(tick=1.0)


@both
@pytest.mark.parametrize(
    ("n", "rid", "aborted", "ended"),
    [
        (1, "job", "job", [0, 1, 2]),
        (1, "job", "job_1", [1]),
        (1, ["x", "y1", "y2"], "y", [1, 2]),
        (2, "job", "job", [0, 1, 2, 3, 4, 5]),
        (2, ["x", "y1", "y2"], "y1", [2, 3]),
    ],
)
async def test_an_abort_reaches_the_items_it_means(autojump_clock, stream, n, rid, aborted, ended):
    """C2, N4: by prefix, or by the client's name for a prompt whose samples have names of their own."""
    body = several(3, n, stream=stream, rid=rid, tokens=8)
    async with world(options=SLOW, split_batches=True) as w, trio.open_nursery() as nursery:

        async def abort() -> None:
            await trio.sleep(2.5)
            assert (await w.ask({"rid": aborted}, "/abort_request")).status == 200

        nursery.start_soon(abort)
        response = await w.ask(body)
        finishes = {}
        for at, value in enumerate(response.values() if stream else response.json()):
            finishes[value.get("index", at)] = value["meta_info"]["finish_reason"]
        assert response.complete
        assert not stream or response.events()[-1] == b"[DONE]"
        assert sorted(finishes) == list(range(3 * n))
        assert [at for at in sorted(finishes) if finishes[at]["type"] == "abort"] == ended
        await w.quiet()
        assert sorted(row["index"] for row in w.rows if row["outcome"] == "aborted") == ended


@both
async def test_a_client_that_leaves_ends_all_items(autojump_clock, stream):
    """C12: within a second, every worker is rid of them."""
    body = several(6, stream=stream, rid="job", tokens=500)
    async with world(options=SLOW, split_batches=True) as w:
        connection = await w.network.connect("proxy", 30000)
        ongoing = await begin(connection, "/generate", body)
        if stream:
            await ongoing.more()
        else:
            await until(lambda: sum(worker.live for worker in w.workers) == 6)
        connection.close()
        left = trio.current_time()
        await until(lambda: not any(worker.live for worker in w.workers))
        assert trio.current_time() - left <= 1.0
        await w.quiet()
        assert [(row["outcome"], row["closed_by"]) for row in w.rows] == [("client_gone", "client")] * 6
        seen = "2xx" if stream else "4xx"
        assert w.metric(f'dyn_relay_http_requests_total{{route="/generate",status_class="{seen}"}}') == 1
        assert not any(w.gauges.values())


async def test_a_client_that_does_not_read_holds_the_items_up(autojump_clock):
    """Backpressure reaches each worker; what is waiting for the client is bounded, and nothing is lost."""
    body = several(4, rid="job", tokens=3000, return_logprob=False)
    async with world(
        options=WorkerOptions(dialect="incremental"), buffer=4096, split_batches=True, stall_timeout_secs=5
    ) as w:
        connection = await w.network.connect("proxy", 30000)
        ongoing = await begin(connection, "/generate", body)
        await trio.sleep(60)  # longer than any silence is allowed to last
        made = [len(live.ids) for worker in w.workers for live in worker.scheduler.live.values()]
        assert len(made) == 4
        assert max(made) < 1500
        response = await ongoing.rest()
        assert judged(response, body, ORACLE, "incremental") == []
        await w.quiet()
        assert [len(row["attempts"]) for row in w.rows] == [1] * 4


async def test_what_waited_for_the_client_goes_out_when_it_reads(autojump_clock):
    """Also when the workers have nothing more to say, and deadlines have interrupted the writing."""
    stall = Fault(at_token(3), STALL, rid_begins("job"))
    plans = [FaultPlan.of(stall) for _ in range(2)]
    async with world(plans=plans, buffer=256, split_batches=True, stall_timeout_secs=5) as w:
        connection = await w.network.connect("proxy", 30000)
        ongoing = await begin(connection, "/generate", several(3, rid="job", return_logprob=False))
        await trio.sleep(100)
        with trio.move_on_after(1):
            await ongoing.rest()
        assert sorted(value["index"] for value in ongoing.response.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        connection.close()


async def test_nobody_writes_without_giving_others_a_turn(autojump_clock):
    """A fast worker must not keep the rest of the proxy waiting: neither its bytes nor the client's need be a pause."""
    async with world(options=SLOW, split_batches=True) as w, trio.open_nursery() as nursery:
        nursery.start_soon(w.ask, several(2))
        await until(lambda: len(w.app.live) == 2)
        with trio.testing.assert_checkpoints():
            await next(iter(w.app.live))._downstream.client.send(b"")
        nursery.cancel_scope.cancel()


async def test_one_keep_alive_for_all(autojump_clock):
    """O1: comments while nothing is said, from before the first event; none while another item speaks."""
    held = Fault(faults.AT_HEAD, STALL, rid_begins("job_1"))
    plans = [FaultPlan.of(held) for _ in range(2)]
    body = several(2, rid="job", tokens=20)
    async with (
        world(plans=plans, options=SLOW, split_batches=True, sse_keep_alive_interval_secs=3) as w,
        trio.open_nursery() as nursery,
    ):

        async def release() -> None:
            await trio.sleep(31)
            for plan in plans:
                plan.release()

        nursery.start_soon(release)
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        assert 3 <= response.body.count(b": keep-alive\n\n") <= 4
        early = response.body.index(b"keep-alive")
        assert b'"completion_tokens":20' in response.body[:early]


async def test_a_comment_at_the_moment_of_a_failure(autojump_clock, monkeypatch):
    """It has sent the head before the status could be said: the stream breaks, and there is no second head."""
    answered = SplitRequest.answered

    def with_comment(self, part, answer):
        answered(self, part, answer)
        assert self.downstream.connection.connection.offer(self.downstream.wrap(b": keep-alive\n\n"))

    monkeypatch.setattr(SplitRequest, "answered", with_comment)
    async with world(plans=[], split_batches=True) as w:
        response = await w.ask(several(2))
        assert (response.status, response.complete) == (200, False)
        assert response.body == b": keep-alive\n\n"
        assert response.wire.count(b"HTTP/1.1") == 1


async def test_a_deadline_ends_them_all(autojump_clock):
    async with world(options=SLOW, split_batches=True, request_timeout_secs=4) as w:
        for stream in (True, False):
            response = await w.ask(several(3, stream=stream, tokens=50))
            assert response.status == (200 if stream else 504)
            assert response.complete is not stream
            await w.quiet()
        assert {row["outcome"] for row in w.rows} <= {"failed", "given_up"}


async def test_a_death_before_the_first_tokens(autojump_clock):
    """All items of a dead worker are suspects, the samples of one prompt the same one: all get their answers."""
    for n in (1, 3):
        plan = FaultPlan.of(Fault(at_token(0), KILL_WORKER))
        body = several(3, n)
        async with world(plans=[plan, None, None], split_batches=True) as w:
            assert judged(await w.ask(body), body, ORACLE) == []
            plan.verify()


async def test_text_answers_and_text_prompts(autojump_clock):
    """Workers with a tokenizer: the items are continued as any text request is."""
    options = WorkerOptions(skip_tokenizer_init=False)
    plain = several(2, rid="job")
    body = {"text": ["ab", "cd"], **{key: value for key, value in plain.items() if key != "input_ids"}}
    async with world(options=options, plans=[None], split_batches=True) as w:
        wanted = {value["index"]: value for value in (await w.ask(body)).values()}
    plans = [FaultPlan.of(Fault(at_token(3), CLOSE, rid_begins("job"))) for _ in range(2)]
    async with world(plans=plans, options=options, split_batches=True) as w:
        response = await w.ask(body)
        got = {value["index"]: value for value in response.values()}
        assert response.complete
        assert [got[at]["output_ids"] for at in (0, 1)] == [wanted[at]["output_ids"] for at in (0, 1)]
        assert [got[at]["text"] for at in (0, 1)] == [wanted[at]["text"] for at in (0, 1)]
        assert list(got[0])[-1] == "index"
        assert sum(plan.count() for plan in plans) == 2
        assert len(json.dumps(got[0]["meta_info"])) > 10
        assert got[0]["meta_info"]["completion_tokens"] == TOKENS
