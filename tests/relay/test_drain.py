"""An operator empties a worker: what runs there ends, or goes on elsewhere, and no client sees anything of it."""

from __future__ import annotations

import itertools

import pytest
import trio

from dyn_testkit.client import begin
from dyn_testkit.engine import Model
from dyn_testkit.faults import (
    AFTER_LAST_TOKEN,
    AT_HEAD,
    KILL_WORKER,
    STALL,
    Fault,
    FaultPlan,
    at_token,
    first,
    nth,
    status,
)
from dyn_testkit.oracle import Oracle
from dyn_testkit.relay import until
from dyn_testkit.tokenizer import PLAIN
from dyn_testkit.worker import WorkerOptions, control
from dyn_testkit.worker.texts import detokenize
from tests.relay import several
from tests.relay.bodies import ORACLE, generate
from tests.relay.crowd import listed, order
from tests.relay.harness import judged, world
from tests.relay.test_texts import TOKENIZERS, recital

SLOW = WorkerOptions(tick=1.0)
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
DIALECTS = pytest.mark.parametrize("dialect", ["cumulative", "incremental", "mixed"])


def options(dialect="cumulative", **changes):
    return WorkerOptions(tick=1.0, dialect=dialect, **changes)


async def during(w, body, meanwhile):
    """The answer to a request, and something that is done while it is under way."""
    answers = []

    async def client():
        answers.append(await w.ask(body))

    async with trio.open_nursery() as clients:
        clients.start_soon(client)
        await until(lambda: any(worker.generates for worker in w.workers))
        await meanwhile()
    await w.quiet()
    return answers[0]


async def made(worker, tokens):
    """Return once it has made so many tokens of the one request that it has, or has ended it."""
    lives = worker.scheduler.live
    await until(lambda: not lives or any(len(live.ids) >= tokens for live in lives.values()))


def causes(w):
    [row] = w.rows
    return [(attempt["worker"], attempt["cause"]) for attempt in row["attempts"]]


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


async def test_a_move_leaves_the_whole_migration_limit(autojump_clock):
    """The one migration that is allowed is still there when the second worker dies."""
    plans = [None, FaultPlan.in_order([(at_token(5), KILL_WORKER)]), None]
    async with world(plans=plans, options=SLOW, policy="round_robin", migration_limit=1) as w:

        async def drain():
            await trio.sleep(5)
            await order(w, "/workers/w1/drain?after=0")

        assert judged(await during(w, generate(30), drain), generate(30), ORACLE) == []
        assert causes(w) == [("w1", "moved"), ("w2", "cut"), ("w3", None)]


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


@DIALECTS
@BOTH
async def test_moved_at_every_token(autojump_clock, stream, dialect):
    """Wherever it happens the answer is that of one run, and the finish is never lost."""
    count = 6
    for at in range(count + 1):
        async with world(options=[options(dialect), options(dialect)], policy="round_robin") as w:

            async def drain(at=at, w=w):
                await made(w.workers[0], at)
                await order(w, "/workers/w1/drain?after=0")

            body = generate(count, stream=stream)
            assert judged(await during(w, body, drain), body, ORACLE, dialect) == [], at
            await w.quiet()
            moved = at < count
            assert [cause for _, cause in causes(w)] == (["moved", None] if moved else [None]), at


@BOTH
async def test_moved_again_and_again(autojump_clock, stream):
    """Each worker leaves in turn and comes back: none of them is held against the request, or against the worker."""
    async with world(plans=[None] * 3, options=SLOW, policy="round_robin", migration_limit=1) as w:
        body = generate(60, stream=stream)

        async def roll():
            for turn in range(7):
                await trio.sleep(5)
                [here] = [number for number, worker in enumerate(w.workers) if worker.live]
                begun = trio.current_time()
                await order(w, f"/workers/{w.workers[here].url}/drain?after=0")
                await until(lambda here=here: not w.workers[here].live)
                assert trio.current_time() - begun < 1, turn
                await order(w, "/workers", {"url": w.workers[here].url})
                await w.ready()

        assert judged(await during(w, body, roll), body, ORACLE) == []
        assert [cause for _, cause in causes(w)] == ["moved"] * 7 + [None]
        assert [worker.failures for worker in w.app.fleet.workers] == [0, 0, 0]


@BOTH
async def test_moved_during_the_dial(autojump_clock, stream):
    """Nothing was sent, so that it concerns any request; the worker does not get it later."""
    async with world(options=SLOW, policy="round_robin", connect_timeout_secs=100) as w:
        await trio.sleep(5)  # pooled connections have aged
        w.network.hang(("w1", 30000))
        body = generate(5, stream=stream, sampling={"frequency_penalty": 0.5})
        answers = []

        async def client():
            answers.append(await w.ask(body))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: w.app.fleet.workers[0].in_flight)
            await order(w, "/workers/w1/drain?after=0")
        await w.quiet()
        assert answers[0].complete
        assert answers[0].status == 200
        assert causes(w) == [("w1", "moved"), ("w2", None)]
        assert w.workers[0].generates == []


@BOTH
async def test_moved_before_the_first_token(autojump_clock, stream):
    """The worker has the request, and has said nothing yet: begun again elsewhere."""
    plan = FaultPlan.in_order([(AT_HEAD, STALL)])
    async with world(plans=[plan, None], options=SLOW, policy="round_robin") as w:

        async def drain():
            await trio.sleep(3)
            await order(w, "/workers/w1/drain?after=0")

        body = generate(5, stream=stream)
        assert judged(await during(w, body, drain), body, ORACLE) == []
        assert causes(w) == [("w1", "moved"), ("w2", None)]
        assert w.metric("dyn_relay_tokens_saved_total") == 0


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
async def test_a_queue_that_is_full_is_waited_for(autojump_clock, stream):
    """Taken from a worker that would have answered, it is not lost to the next one's full queue, tokens or not."""
    plans = [FaultPlan.in_order([(AT_HEAD, STALL)]), FaultPlan.of(Fault(AT_HEAD, status(503), first(6)))]
    async with world(plans=plans, options=SLOW, policy="round_robin") as w:

        async def drain():
            await trio.sleep(1)
            await order(w, "/workers/w1/drain?after=0")

        body = generate(5, stream=stream)
        assert judged(await during(w, body, drain), body, ORACLE) == []
        plans[1].verify()


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


async def test_moved_while_a_question_is_open(autojump_clock, monkeypatch):
    """A continuation's worker is asked for a text when it is told to leave: the answer is awaited, then it moves."""
    asked = trio.Event()

    async def answer(worker, request):
        asked.set()
        await trio.sleep(20)
        return detokenize(worker.options, request)

    monkeypatch.setitem(control.ROUTES, "/detokenize", (("POST",), False, answer))
    workers = [options(skip_tokenizer_init=False) for _ in range(3)]
    oracle = Oracle(Model(), tokenizer=PLAIN)
    async with world(plans=[None] * 3, options=workers, policy="round_robin") as w:

        async def drain():
            await trio.sleep(3)
            await order(w, "/workers/w1/drain?after=0")
            await asked.wait()
            await order(w, "/workers/w2/drain?after=0")

        body = generate(60)
        assert judged(await during(w, body, drain), body, oracle) == []
        assert causes(w) == [("w1", "moved"), ("w2", "moved"), ("w3", None)]


@BOTH
async def test_each_answer_of_a_split_request_moves_by_itself(autojump_clock, stream):
    async with world(plans=[None] * 3, options=SLOW, split_batches=True) as w:
        body = several.several(6, stream=stream, tokens=20)

        async def drain():
            await trio.sleep(5)
            here = w.workers[0].live
            assert here == 2
            await order(w, "/workers/w1/drain?after=0")
            await until(lambda: not w.workers[0].live)
            assert [worker.live for worker in w.workers[1:]] == [3, 3]

        assert several.judged(await during(w, body, drain), body, ORACLE) == []
        assert sorted(row["attempts"][0]["cause"] or "" for row in w.rows) == [""] * 4 + ["moved"] * 2


async def test_a_batch_as_a_whole_stays(autojump_clock):
    async with world(options=SLOW, policy="round_robin") as w:
        body = several.several(3, stream=False, tokens=20)

        async def drain():
            await trio.sleep(5)
            await order(w, "/workers/w1/drain?after=0")

        assert several.judged(await during(w, body, drain), body, ORACLE) == []
        assert causes(w) == [("w1", None)]


async def test_an_abort_of_what_was_moved(autojump_clock):
    """It ends as an abort, and goes nowhere: before the new worker has it, and after."""
    for later in (0.0, 5.0):
        async with world(options=SLOW, policy="round_robin") as w:

            async def drain(later=later, w=w):
                await trio.sleep(3)
                await order(w, "/workers/w1/drain?after=0")
                await trio.sleep(later)
                await order(w, "/abort_request", {"rid": "R"})

            response = await during(w, generate(60, rid="R"), drain)
            assert response.complete
            assert response.values()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
            await w.quiet()
            await trio.sleep(10)
            assert [worker.live for worker in w.workers] == [0, 0]


async def test_a_client_that_reads_slowly_loses_nothing(autojump_clock):
    """What it has not taken yet when its request is moved comes before what the next worker gives."""
    tokens = 200
    async with world(options=WorkerOptions(tick=0.01), policy="round_robin", buffer=1000) as w:
        connection = await w.network.connect("proxy", 30000)
        ongoing = await begin(connection, "/generate", generate(tokens), headers={"connection": "close"})
        await trio.sleep(1)
        await order(w, "/workers/w1/drain?after=0")
        while await ongoing.more():  # noqa: ASYNC110 -- a slow reader
            await trio.sleep(0.02)
        response = ongoing.response
        response.body = b"".join(response.parts)
        assert judged(response, generate(tokens), ORACLE) == []
        await w.quiet()
        assert causes(w) == [("w1", "moved"), ("w2", None)]


async def test_a_stale_connection_is_not_redialled_at_a_worker_that_leaves(autojump_clock):
    """A17: the second try of a reused connection that broke is a new attempt, too."""
    plan = FaultPlan.of(Fault(AT_HEAD, STALL, nth(1)))
    async with world(plans=[plan, None], options=SLOW, policy="round_robin") as w:
        for _ in range(2):
            assert judged(await w.ask(generate(1)), generate(1), ORACLE) == []

        async def drain():
            await plan.fired()
            await order(w, "/workers/w1/drain")
            w.workers[0].kill()
            await w.workers[0].restart()

        assert judged(await during(w, generate(5), drain), generate(5), ORACLE) == []
        attempts = [(attempt["worker"], attempt["cause"]) for attempt in w.rows[-1]["attempts"]]
        assert attempts == [("w1", "stale"), ("w2", None)]


@BOTH
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("a\n\nb\n\nHuman: c", "\n\nHuman"),
        ("é€😀 ab é😀", "ab"),
        ("中文中 abc", None),
    ],
)
async def test_texts_are_moved_at_every_token(autojump_clock, stream, kind, text, stop):
    """No half character is lost, or told twice. With stop strings it stays: one may have begun where nobody sees it."""
    model, prompt, count = recital(kind, text)
    tokenizer = TOKENIZERS[kind]
    workers = [WorkerOptions(tick=1.0, model=model, tokenizer=tokenizer, skip_tokenizer_init=False) for _ in range(2)]
    oracle = Oracle(model, tokenizer=tokenizer)
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, "stream_interval": 1, "stop": stop}
    body = {"input_ids": prompt, "sampling_params": params, "stream": stream, "return_logprob": True}
    moved = 0
    for at in range(1, count):
        async with world(options=workers, policy="round_robin") as w:

            async def drain(at=at, w=w):
                await made(w.workers[0], at)
                await order(w, "/workers/w1/drain?after=0")

            assert judged(await during(w, body, drain), body, oracle) == [], at
            moved += len(w.rows[0]["attempts"]) - 1
    assert moved == (0 if stop else count - 1)
