"""What a worker's health says beside its requests: bad health is no reason to lose what only that worker has."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.faults import STALL, FaultPlan, at_token
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world
from tests.relay.odd import Scripted
from tests.relay.test_last_words import HEAD, chunked, event

REFUSED = {"frequency_penalty": 0.5}


@pytest.mark.parametrize("delay", [0.0, 20.0])
async def test_a_refused_answer_is_waited_for_while_its_worker_speaks(autojump_clock, delay):
    """B1: draining, an engine says 503 and works on; busy, its /health takes up to 20 s. Nobody else has the answer."""
    options = WorkerOptions(tick=4.0, health_delay=delay)
    async with world(plans=[None], options=options, stall_timeout_secs=5, health_check_interval_secs=3600) as w:
        w.workers[0].health_status = 503
        response = await w.ask(generate(20, stream=False, sampling=REFUSED))
        assert (response.status, len(response.json()["output_ids"])) == (200, 20)


async def test_but_not_if_it_says_nothing(autojump_clock):
    options = WorkerOptions(tick=4.0)
    async with world(plans=[None], options=options, stall_timeout_secs=5, health_check_interval_secs=3600) as w:
        w.workers[0].health_status = None
        response = await w.ask(generate(20, stream=False, sampling=REFUSED))
        assert (response.status, response.json()["reason"]) == (504, "frequency_penalty")


async def test_a_long_prefill_is_not_thrown_away_at_once(autojump_clock):
    """Before its first token an engine that is busy with a prompt fails its probes; each retry would prefill again."""
    options = WorkerOptions(tick=8.0)
    async with world(options=options, stall_timeout_secs=5, health_check_interval_secs=3600) as w:
        for worker in w.workers:
            worker.health_status = 503
        assert judged(await w.ask(generate(1)), generate(1), ORACLE) == []
        assert len(w.workers[0].generates) + len(w.workers[1].generates) == 1


async def test_but_not_kept_for_ever(autojump_clock):
    plan = FaultPlan.in_order([(faults.AT_HEAD, STALL)])
    async with world(plans=[plan, None], policy="round_robin", stall_timeout_secs=30) as w:
        w.workers[0].health_status = 503
        begin = trio.current_time()
        assert judged(await w.ask(generate()), generate(), ORACLE) == []
        assert 59 < trio.current_time() - begin < 95


class Chatty(Scripted):
    """Gives one event, then says nothing for ever, in many words; its health never answers."""

    async def _serve(self, connection):
        head = await connection.receive()
        if head.startswith(b"GET /health") and self.heads:
            await trio.sleep_forever()
        if b"/generate" not in head:
            await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            connection.close()
            return
        self.heads.append(head)
        await connection.send(HEAD + chunked(event("r", [9])))
        while True:
            await connection.send(chunked(self.answer))
            await trio.sleep(1)


@pytest.mark.parametrize("words", [b": x\n\n", b"d"])
async def test_comments_and_halves_of_events_are_no_sign_of_life(autojump_clock, words):
    """A refused stream whose worker only keeps its connection busy."""
    async with world(plans=[], stall_timeout_secs=30) as w:
        worker = Chatty(words, 0.0)
        await w.nursery.start(worker.run, w.network, "odd")
        w.app.fleet.add("http://odd:30000")
        await w.ready()
        with trio.fail_after(90):
            response = await w.ask(generate(sampling=REFUSED, rid="r"))
        assert not response.complete
        assert response.values()[-1]["error"]["code"] == 504


async def test_a_worker_that_refuses_our_key_gets_no_more_requests_than_it_must(autojump_clock):
    """It answers fastest, so that it always has the least load; and the client's key is not what it refuses."""
    options = [WorkerOptions(), WorkerOptions(api_key="other")]
    async with world(options=options) as w:
        for _ in range(20):
            assert judged(await w.ask(generate()), generate(), ORACLE) == []
        assert len(w.workers[1].generates) <= 1


async def test_if_all_refuse_the_key_the_client_is_told_in_their_words(autojump_clock):
    async with world(options=WorkerOptions(api_key="other")) as w:
        response = await w.ask(generate(stream=False))
        assert (response.status, response.json()) == (401, {"error": "Unauthorized"})


async def test_a_worker_that_missed_a_probe_is_read_again(autojump_clock):
    """Another process may answer at its address, with other sampling defaults: it must not continue a stream."""
    plan = FaultPlan.in_order([(at_token(3), faults.KILL_WORKER)])
    settings = {"health_check_interval_secs": 5, "policy": "round_robin"}
    async with world(plans=[plan, None], **settings) as w:
        w.workers[1].kill()
        await trio.sleep(6)  # one probe was refused
        await w.workers[1].restart(WorkerOptions(preferred_sampling_params={"frequency_penalty": 0.7}))
        await trio.sleep(6)  # and one was not
        [broken] = [answer for answer in [await w.ask(generate()), await w.ask(generate())] if not answer.complete]
        plan.verify()
        assert broken.values()[-1]["error"]["reason"] == "no_fit_worker"


async def test_an_abort_does_not_wait_for_a_frozen_worker(autojump_clock):
    plan = FaultPlan.in_order([(at_token(3), STALL)])
    async with world(plans=[plan]) as w:
        answers = []

        async def client():
            answers.append(await w.ask(generate(rid="r")))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plan.fired()
            w.network.partition("client", "w1")  # stopped, it answers no order either
            begin = trio.current_time()
            await w.ask({"rid": "r"}, "/abort_request")
        assert trio.current_time() - begin < 7
        assert answers[0].values()[-1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_probe_that_is_on_its_way_does_not_use_up_the_question(autojump_clock):
    """Busy, /health takes 20 s, so that there is always one on its way; the question is answered by the next one."""
    options = WorkerOptions(tick=4.0, health_delay=20.0)
    async with world(plans=[None], options=options, stall_timeout_secs=5, health_check_interval_secs=1) as w:
        response = await w.ask(generate(30, stream=False, sampling=REFUSED))
        assert (response.status, len(response.json()["output_ids"])) == (200, 30)
