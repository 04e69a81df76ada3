"""An engine that is back at its address as another one: what was known of it is no longer so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dyn_relay.direct.engine import Engine
from dyn_relay.grpc.metadata import Metadata
from dyn_testkit.client import Response
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import open_relay, until
from dyn_testkit.sidecar import open_sidecar
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from tests.direct.kit import direct
from tests.direct.test_proxy import ORACLE, body
from tests.relay.harness import World, judged

OPTIONS = WorkerOptions(tick=0.1, grpc_port=30001)
DIALECTS = [("cumulative", "incremental"), ("incremental", "cumulative")]


async def replaced(w: World, gap: float, **options: Any) -> None:
    """The one engine dies, and another one takes its place after `gap` seconds."""
    [worker] = w.workers
    await w.ask(body(1))
    worker.kill()
    await trio.sleep(gap)
    await worker.restart(replace(worker.options, **options))
    await w.ready()


def told(answer: Response) -> tuple[int, int]:
    """Ids that came, all deltas together, and tokens that were counted."""
    values = answer.values()
    return sum(len(value["output_ids"]) for value in values), values[-1]["meta_info"]["completion_tokens"]


@pytest.mark.parametrize("gap", [0.5, 9.5, 25])
async def test_deltas_of_a_new_process_are_all_told(autojump_clock: MockClock, gap: float) -> None:
    """The one before was cumulative: of its events some may be left out."""
    async with direct(options=replace(OPTIONS, dialect="cumulative"), plans=[None]) as w:
        await replaced(w, gap, dialect="incremental")
        asked = body(2)
        asked["sampling_params"] |= {"stream_interval": 8, "frequency_penalty": 0.5, "max_new_tokens": 64}
        answer = await w.ask(asked)
        assert (answer.status, answer.complete) == (200, True)
        assert told(answer) == (64, 64)


@pytest.mark.parametrize(("before", "after"), DIALECTS)
async def test_an_abort_repeats_nothing(autojump_clock: MockClock, before: str, after: str) -> None:
    async with direct(options=replace(OPTIONS, dialect=before), plans=[None]) as w:
        await replaced(w, 3.0, dialect=after)
        asked = body(2)
        asked["sampling_params"] |= {"frequency_penalty": 0.5, "max_new_tokens": 64}
        answers: list[Response] = []

        async def ask() -> None:
            answers.append(await w.ask(asked))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1.05)
            await w.ask({"rid": asked["rid"]}, "/abort_request")
        values = answers[0].values()
        lists = [value["output_ids"] for value in values]
        last = sum(map(len, lists)) if after == "incremental" else len(lists[-1])
        assert last == values[-1]["meta_info"]["completion_tokens"]
        assert values[-1]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(("before", "after"), DIALECTS)
@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
async def test_a_sidecar_of_an_engine_that_speaks_otherwise(
    autojump_clock: MockClock, before: str, after: str, stream: bool
) -> None:
    network = SimNetwork(1)
    async with (
        open_fleet(network, "w{}", 30000) as fleet,
        open_relay(network, "proxy", 30000, [], seed=1, log_level="error") as relay,
    ):
        [worker] = await fleet(1, options=replace(OPTIONS, dialect=before))
        sidecar = open_sidecar(network, worker.url, [relay.url], listen="side:31000", engine_grpc="w1:30001")
        async with sidecar:
            await until(lambda: bool(relay.app.fleet.workers))
            await relay.ready()
            assert judged(await relay.ask(body(1, stream)), body(1, stream), ORACLE, before) == []
            worker.kill()
            await until(lambda: not relay.app.fleet.workers)
            await worker.restart(replace(worker.options, dialect=after))
            await until(lambda: bool(relay.app.fleet.workers))
            await relay.ready()
            assert judged(await relay.ask(body(2, stream)), body(2, stream), ORACLE, after) == []


async def test_an_engine_that_has_a_tokenizer_now_is_told_how_to_make_texts(autojump_clock: MockClock) -> None:
    options = replace(OPTIONS, skip_tokenizer_init=True)
    async with direct(options=options, plans=[None]) as w:
        await replaced(w, 3.0, skip_tokenizer_init=False)
        asked = body(2, stream=False)
        asked["sampling_params"]["no_stop_trim"] = True
        refused = await w.ask(asked)
        assert (refused.status, b"no_stop_trim" in refused.body) == (400, True)
        text = {"text": "a b c", "sampling_params": body()["sampling_params"]}
        assert (await w.ask(text)).status == 200


async def test_calls_that_need_many_connections_do_not_ask_again_and_again(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with direct(options=OPTIONS, plans=[None]) as w:
        answers: list[tuple[int, Response]] = []
        asked: list[Engine] = []

        async def ask(number: int) -> None:
            answers.append((number, await w.ask(body(number))))

        async def counted(engine: Engine, metadata: Metadata = ()) -> dict[str, object]:
            asked.append(engine)
            return await told_by(engine, metadata)

        told_by = Engine.server_info
        monkeypatch.setattr(Engine, "server_info", counted)
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(ask, number)
        assert all(judged(answer, body(number), ORACLE) == [] for number, answer in answers)
        assert 0 < len(asked) <= 100 / 8 + 3
