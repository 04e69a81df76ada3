"""The mock worker behaves as SGLang does: rids, aborts, queue, pause, health, keys, deaths."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from mock_worker_kit import ORACLE, body, finishes, options

from dyn_testkit.client import Response, fetch
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker


@pytest.mark.parametrize("stream", [False, True])
async def test_a_live_rid_is_refused_and_free_again_later(autojump_clock: trio.testing.MockClock, stream: bool) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker, trio.open_nursery() as nursery:
        nursery.start_soon(fetch, network, worker.url, "/generate", body(5, rid="r"))
        await worker.reaches(requests=1)
        twice = await fetch(network, worker.url, "/generate", body(5, rid="r", stream=stream))
        message = "Duplicate request ID detected: r"
        if stream:
            assert twice.status == 200
            assert twice.values()[0]["error"]["message"] == message
        else:
            assert (twice.status, twice.json()) == (400, {"error": {"message": message}})
        await trio.sleep(10)
        assert (await fetch(network, worker.url, "/generate", body(5, rid="r"))).status == 200


@pytest.mark.parametrize(("match", "aborted"), [("prefix", ["job-1", "job-10"]), ("exact", ["job-1"])])
async def test_abort_by_rid(autojump_clock: trio.testing.MockClock, match: Any, aborted: list[str]) -> None:
    """C3: the scheduler matches rids by prefix, but only a rid that is live itself reaches it."""
    network = SimNetwork()
    answers: dict[str, Response] = {}

    async def generate(rid: str, stream: bool) -> None:
        answers[rid] = await fetch(network, worker.url, "/generate", body(8, rid=rid, stream=stream))

    async with MockWorker.serve(network, "worker", 1, options(abort_match=match)) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, "job-1", True)
            nursery.start_soon(generate, "job-10", True)
            nursery.start_soon(generate, "other", False)
            await trio.sleep(3.5)
            for rid in ("job", "job-1", "", "unknown"):
                reply = await fetch(network, worker.url, "/abort_request", {"rid": rid})
                assert (reply.status, reply.body) == (200, b"")
        assert [abort["rid"] for abort in worker.aborts] == ["job", "job-1", "", "unknown"]
    ended = {rid: answer.values()[-1] for rid, answer in answers.items() if rid != "other"}
    wish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert [rid for rid, value in sorted(ended.items()) if value["meta_info"]["finish_reason"] == wish] == aborted
    assert len(ended["job-1"]["output_ids"]) == 4
    assert answers["job-1"].events()[-1] == b"[DONE]"
    assert answers["other"].json()["meta_info"]["finish_reason"]["type"] == "length"


async def test_abort_all_reaches_unary_requests(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    answers: list[Response] = []
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        async with trio.open_nursery() as nursery:

            async def generate() -> None:
                answers.append(await fetch(network, worker.url, "/generate", body(8)))

            nursery.start_soon(generate)
            await trio.sleep(2.5)
            await fetch(network, worker.url, "/abort_request", {"abort_all": True})
        assert worker.live == 0
    value = answers[0].json()
    assert answers[0].status == 200
    assert value["meta_info"]["finish_reason"]["type"] == "abort"
    assert value["output_ids"] == ORACLE.answer(body(8))["output_ids"][:3]


async def test_queue_full_and_order(autojump_clock: trio.testing.MockClock) -> None:
    """A8: 503 with the scheduler's body for unary, a short abort event for streams; the queue is first come."""
    network = SimNetwork()
    ended: list[tuple[str, int]] = []

    async def generate(rid: str) -> None:
        answer = await fetch(network, worker.url, "/generate", body(3, rid=rid))
        ended.append((rid, answer.status))

    setup = options(max_running_requests=1, max_queued_requests=2)
    async with MockWorker.serve(network, "worker", 1, setup) as worker, trio.open_nursery() as nursery:
        for count, rid in enumerate("abc", 1):
            nursery.start_soon(generate, rid)
            await worker.reaches(requests=count)
            await trio.testing.wait_all_tasks_blocked()
        full = await fetch(network, worker.url, "/generate", body(3))
        message = "The request queue is full."
        assert full.status == 503
        assert full.json() == {"object": "error", "message": message, "type": "503", "param": None, "code": 503}
        stream = await fetch(network, worker.url, "/generate", body(3, stream=True))
        assert finishes(stream) == [{"type": "abort", "status_code": 503, "message": message}]
        loads = (await fetch(network, worker.url, "/v1/loads")).json()["loads"][0]
        assert (loads["num_running_reqs"], loads["num_waiting_reqs"]) == (1, 2)
    assert ended == [("a", 200), ("b", 200), ("c", 200)]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause(autojump_clock: trio.testing.MockClock, mode: str) -> None:
    """Running requests are dropped or held; new ones wait; `/ready` says 503."""
    network = SimNetwork()
    answers: list[Response] = []

    async def generate() -> None:
        answers.append(await fetch(network, worker.url, "/generate", body(5, stream=True)))

    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(2.5)
            await fetch(network, worker.url, "/pause_generation", {"mode": mode})
            nursery.start_soon(generate)
            await trio.sleep(100)
            assert len(answers) == (mode == "abort")
            assert (await fetch(network, worker.url, "/ready")).status == 503
            await fetch(network, worker.url, "/continue_generation", {})
        assert (await fetch(network, worker.url, "/ready")).status == 200
    first, second = answers
    last = first.values()[-1]["meta_info"]
    assert last["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert last["num_retractions"] == (mode == "retract")
    assert finishes(second)[-1] == {"type": "length", "length": 5}


async def test_abort_in_the_waiting_queue(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker, trio.open_nursery() as nursery:
        await fetch(network, worker.url, "/pause_generation", {"mode": "in_place"})

        async def abort() -> None:
            await worker.reaches(requests=2)
            await fetch(network, worker.url, "/abort_request", {"rid": "r"})

        nursery.start_soon(abort)
        echo = (await fetch(network, worker.url, "/generate", body(5, rid="r", stream=True))).values()
    assert [value["meta_info"]["finish_reason"] for value in echo] == [
        {"type": "abort", "message": "Abort in waiting queue"}
    ]
    assert "prompt_tokens" not in echo[0]["meta_info"]
    assert echo[0]["text"] == ""


async def test_keys() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(api_key="k", admin_api_key="a")) as worker:

        async def status(path: str, key: str | None, data: Any = None) -> int:
            headers = {"authorization": f"bearer {key}"} if key else {}
            return (await fetch(network, worker.url, path, data, headers=headers)).status

        assert await status("/health", None) == 200
        assert [await status("/model_info", key) for key in (None, "x", "k")] == [401, 401, 200]
        assert [await status("/abort_request", key, {}) for key in (None, "k", "a")] == [401, 401, 200]
        refused = await fetch(network, worker.url, "/model_info")
        assert refused.json() == {"error": "Unauthorized"}


@pytest.mark.parametrize(
    "poison",
    [
        {"input_ids": [7, 300]},
        {"input_ids": [7, -1]},
        {"return_logprob": True, "top_logprobs_num": 301},
    ],
)
async def test_poison_kills_the_whole_worker(autojump_clock: trio.testing.MockClock, poison: dict[str, Any]) -> None:
    """The client sees an end without bytes, bystanders are cut, dials are refused; a restarted worker is empty."""
    network = SimNetwork()
    bystander: list[Response] = []

    async def generate() -> None:
        bystander.append(await fetch(network, worker.url, "/generate", body(500, stream=True)))

    async with MockWorker.serve(network, "worker", 1, options(death_delay=5.1)) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(3.5)
            killed = await fetch(network, worker.url, "/generate", body(**poison))
            assert (killed.status, killed.wire, killed.broken) == (0, b"", "eof")
            assert trio.current_time() == pytest.approx(8.6)
        assert not bystander[0].complete
        assert bystander[0].events()
        assert not worker.alive
        with pytest.raises(Exception, match="refused"):
            await fetch(network, worker.url, "/health")
        await worker.restart()
        assert worker.live == 0
        assert (await fetch(network, worker.url, "/health")).status == 200
        assert worker.deaths == 1


async def test_the_second_negative_logprob_start_kills() -> None:
    network = SimNetwork()
    asked = body(return_logprob=True, logprob_start_len=-7)
    async with MockWorker.serve(network, "worker", 1, options(tick=0)) as worker:
        first = (await fetch(network, worker.url, "/generate", asked)).json()
        assert len(first["meta_info"]["input_token_logprobs"]) == 3
        assert (await fetch(network, worker.url, "/generate", asked)).status == 0
        await worker.dead()


async def test_health_can_be_slow_ill_or_hang(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(health_delay=1.07)) as worker:
        assert (await fetch(network, worker.url, "/health_generate")).status == 200
        assert trio.current_time() == pytest.approx(1.07)
        worker.health_status = 503
        assert (await fetch(network, worker.url, "/health")).status == 503
        worker.health_status = None
        with trio.move_on_after(60) as scope:
            await fetch(network, worker.url, "/health")
        assert scope.cancelled_caught


async def test_a_frozen_worker_is_silent_and_may_thaw(autojump_clock: trio.testing.MockClock) -> None:
    """B2: the socket stays open, `/model_info` still answers, and after the thaw the stream ends whole."""
    network = SimNetwork()
    answers: list[Response] = []

    async def generate() -> None:
        answers.append(await fetch(network, worker.url, "/generate", body(8, stream=True)))

    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(3.5)
            worker.freeze()
            with trio.move_on_after(1000) as probe:
                await fetch(network, worker.url, "/health")
            assert probe.cancelled_caught
            assert not answers
            assert (await fetch(network, worker.url, "/model_info")).status == 200
            worker.thaw()
        assert (await fetch(network, worker.url, "/health")).status == 200
    assert finishes(answers[0])[-1] == {"type": "length", "length": 8}
    assert answers[0].values()[-1]["meta_info"]["num_retractions"] == 0
