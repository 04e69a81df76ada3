"""An operator empties a worker: what runs there ends, stays, or goes on elsewhere when its time is over."""

from __future__ import annotations

import itertools

import pytest
import trio

from dyn_testkit.faults import AFTER_LAST_TOKEN, STALL, Fault, FaultPlan
from dyn_testkit.relay import until
from tests.relay import several
from tests.relay.bodies import ORACLE, generate
from tests.relay.crowd import listed, order
from tests.relay.harness import judged, world
from tests.relay.leaving import BOTH, SLOW, causes, during, options


@BOTH
async def test_what_has_not_ended_in_time_is_moved(autojump_clock, stream):
    """K3: after 30 s the rest goes on elsewhere: exact, at no cost of the migration limit, no fault of the worker's."""
    async with world(options=SLOW, policy="round_robin", migration_limit=1) as w:
        body = generate(60, stream=stream)
        left = w.app.fleet.workers[0]

        async def drain():
            assert (await order(w, "/workers/w1/drain?after=30s")).status == 202
            before = (await listed(w))["w1"]
            assert (before["state"], before["in_flight"]) == ("draining", 1)
            await trio.sleep(29)
            assert (await listed(w))["w1"]["in_flight"] == 1
            await trio.sleep(2)
            assert "w1" not in await listed(w)

        response = await during(w, body, drain)
        assert judged(response, body, ORACLE) == []
        assert causes(w) == [("w1", "moved"), ("w2", None)]
        # An engine is asked to tell a unary answer's tokens rarely.
        assert w.rows[0]["attempts"][1]["resumed_from"] >= (28 if stream else 1)
        assert w.metric('dyn_relay_migrations_total{reason="moved"}') == 1
        assert w.metric('dyn_relay_attempts_total{outcome="moved"}') == 1
        assert w.workers[0].aborts == [{"rid": w.workers[0].generates[0].json()["rid"]}]
        assert w.workers[0].live == 0
        assert (left.state, left.failures) == ("draining", 0)


async def test_who_has_to_wait_for_a_permit_waits_at_work(autojump_clock):
    """`--retry-permits`: the others are moved when the one before has its first token; until then they go on."""
    async with world(options=SLOW, policy="least_loaded", retry_permits=1) as w:
        answers = []

        async def client():
            answers.append(judged(await w.ask(generate(40)), generate(40), ORACLE))

        async with trio.open_nursery() as clients:
            await order(w, f"/workers/{w.workers[1].url}/drain")
            for _ in range(6):
                clients.start_soon(client)
            await until(lambda: w.workers[0].live == 6)
            await order(w, "/workers", {"url": w.workers[1].url})
            await w.ready()
            await order(w, "/workers/w1/drain?after=0")
        await w.quiet()
        assert answers == [[]] * 6
        moves = sorted(
            (row["time"] + left["ended"], row["time"] + taken["started"], row["time"] + taken["first_token"])
            for row in w.rows
            for left, taken in [row["attempts"]]
        )
        assert len(moves) == 6
        assert all(started - ended < 0.1 for ended, started, _ in moves)
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(moves))


@BOTH
async def test_without_a_time_nothing_moves(autojump_clock, stream):
    """A17: no new attempts, live ones end in peace, and the worker leaves when the last has."""
    async with world(options=SLOW, policy="round_robin") as w:
        body = generate(60, stream=stream)

        async def drain():
            assert (await order(w, "/workers/w1/drain")).status == 202
            for _ in range(3):
                assert judged(await w.ask(generate(2)), generate(2), ORACLE) == []
            assert len(w.workers[0].generates) == 1
            assert "w1" in await listed(w)

        assert judged(await during(w, body, drain), body, ORACLE) == []
        assert w.rows[-1]["attempts"][0]["cause"] is None
        assert "w1" not in await listed(w)


@pytest.mark.parametrize("query", ["after=-1", "after=soon", "after=1m", "after=1e3", "after=inf", "after=3 0"])
async def test_a_time_that_cannot_be_read_is_refused(autojump_clock, query):
    async with world() as w:
        answer = await order(w, f"/workers/w1/drain?{query.replace(' ', '%20')}")
        assert (answer.status, answer.json()["message"].split(":")[0]) == (400, "after")
        assert (await listed(w))["w1"]["state"] == "ready"
        assert (await order(w, "/workers/w9/drain")).status == 404
        assert (await order(w, "/workers/w1/drain", method="GET")).status == 405
        assert (await order(w, f"/workers/{w.workers[0].url}/drain?after=1.5")).status == 202


@BOTH
async def test_a_request_that_cannot_be_continued_stays(autojump_clock, stream):
    """B7: it ends where it is, however long that takes; the list says that somebody is left."""
    async with world(options=SLOW, policy="round_robin") as w:
        body = generate(60, stream=stream, sampling={"frequency_penalty": 0.5})

        async def drain():
            await order(w, "/workers/w1/drain?after=0")
            await trio.sleep(30)
            assert (await listed(w))["w1"]["in_flight"] == 1

        response = await during(w, body, drain)
        assert response.complete
        assert response.status == 200
        await w.quiet()
        assert causes(w) == [("w1", None)]
        assert "w1" not in await listed(w)


async def test_who_has_nobody_to_go_to_stays_until_somebody_comes(autojump_clock):
    """The last worker is not emptied into nothing; a new one is used as soon as it is ready."""
    async with world(plans=[None, None], options=SLOW, policy="round_robin") as w:
        w.workers[1].kill()
        await until(lambda: w.app.fleet.workers[1].state == "dead")
        body = generate(200)

        async def drain():
            await order(w, "/workers/w1/drain?after=0")
            await trio.sleep(20)
            assert w.workers[0].live == 1
            await w.workers[1].restart()
            await until(lambda: not w.workers[0].live)

        assert judged(await during(w, body, drain), body, ORACLE) == []
        assert causes(w) == [("w1", "moved"), ("w2", None)]


async def test_taken_back_before_its_time(autojump_clock):
    """Added again, or told to drain without a time, it keeps what it has."""
    for last in ("add", "drain", "delete", "put"):
        async with world(options=SLOW, policy="round_robin") as w:

            async def change(last=last, w=w):
                await order(w, "/workers/w1/drain?after=20")
                await trio.sleep(10)
                match last:
                    case "add":
                        await order(w, "/workers", {"url": w.workers[0].url})
                    case "drain":
                        await order(w, "/workers/w1/drain")
                    case "delete":
                        await order(w, "/workers/w1", method="DELETE")
                    case "put":
                        await order(w, "/workers/w1", {"url": w.workers[0].url}, method="PUT")

            assert judged(await during(w, generate(60), change), generate(60), ORACLE) == []
            assert causes(w) == [("w1", None)], last


async def test_a_later_time_replaces_an_earlier_one(autojump_clock):
    async with world(options=SLOW, policy="round_robin") as w:

        async def drain():
            begun = trio.current_time()
            await order(w, "/workers/w1/drain?after=5")
            await order(w, "/workers/w1/drain?after=20")
            await until(lambda: not w.workers[0].live)
            assert 19 < trio.current_time() - begun < 22

        assert judged(await during(w, generate(60), drain), generate(60), ORACLE) == []


@BOTH
async def test_a_text_whose_finish_is_awaited_stays_for_it(autojump_clock, stream):
    """Of a text the finish cannot be made here: the engine that owes nothing else keeps the request, however late."""
    plan = FaultPlan.of(Fault(AFTER_LAST_TOKEN, STALL))
    workers = [options(skip_tokenizer_init=False) for _ in range(2)]
    async with world(plans=[plan, None], options=workers, policy="round_robin") as w:

        async def drain():
            await plan.fired()
            await order(w, "/workers/w1/drain?after=0")
            await trio.sleep(60)
            assert (await listed(w))["w1"]["in_flight"] == 1
            await order(w, "/abort_request", {"rid": "R"})

        body = generate(4, stream=stream, rid="R", sampling={"stream_interval": 1})
        response = await during(w, body, drain)
        value = response.values()[-1] if stream else response.json()
        assert value["meta_info"]["completion_tokens"] == 4
        assert w.workers[1].generates == []


async def test_a_batch_as_a_whole_stays(autojump_clock):
    async with world(options=SLOW, policy="round_robin") as w:
        body = several.several(3, stream=False, tokens=20)

        async def drain():
            await trio.sleep(5)
            await order(w, "/workers/w1/drain?after=0")

        assert several.judged(await during(w, body, drain), body, ORACLE) == []
        assert causes(w) == [("w1", None)]
