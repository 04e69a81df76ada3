"""A request is taken from a worker that is to be empty: whatever it was about, its client sees nothing of it."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit.client import begin
from dyn_testkit.engine import Model
from dyn_testkit.faults import AT_HEAD, KILL_WORKER, STALL, Fault, FaultPlan, at_token, first, nth, status
from dyn_testkit.oracle import Oracle
from dyn_testkit.relay import until
from dyn_testkit.tokenizer import PLAIN
from dyn_testkit.worker import WorkerOptions, control
from dyn_testkit.worker.texts import detokenize
from tests.relay import several
from tests.relay.bodies import ORACLE, generate
from tests.relay.crowd import order
from tests.relay.harness import judged, world
from tests.relay.leaving import BOTH, SLOW, causes, during, made, options
from tests.relay.test_texts import TOKENIZERS, recital

DIALECTS = pytest.mark.parametrize("dialect", ["cumulative", "incremental", "mixed"])


async def test_a_move_leaves_the_whole_migration_limit(autojump_clock):
    """The one migration that is allowed is still there when the second worker dies."""
    plans = [None, FaultPlan.in_order([(at_token(5), KILL_WORKER)]), None]
    async with world(plans=plans, options=SLOW, policy="round_robin", migration_limit=1) as w:

        async def drain():
            await trio.sleep(5)
            await order(w, "/workers/w1/drain?after=0")

        assert judged(await during(w, generate(30), drain), generate(30), ORACLE) == []
        assert causes(w) == [("w1", "moved"), ("w2", "cut"), ("w3", None)]


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
