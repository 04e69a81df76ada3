"""The client records what it saw, whatever that was, and campaigns can wait for what clients see."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
import trio
from chaos_http import chunked, plain, serving

from dyn_chaos import clients, load
from dyn_chaos.distribution import Distribution
from dyn_chaos.load import Plan
from dyn_testkit.history import Record
from dyn_testkit.watch import Watch, started

ONE = b'data: {"output_ids":[4],"meta_info":{"completion_tokens":1}}\n\n'
TWO = b'data: {"output_ids":[5],"meta_info":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


async def ask(answer: bytes, watch: Watch | None = None) -> Record:
    async with serving({"/generate": answer}) as url:
        records = await load.send_all(url, [Plan("k", {"stream": True})], watch)
    return records["k"]


async def test_a_stream_is_recorded_event_by_event() -> None:
    watch = Watch()
    record = await ask(chunked(ONE, TWO, DONE), watch)
    assert [json.loads(event)["output_ids"] for event in record.events] == [[4], [5]]
    assert (record.status, record.done, record.error, record.stray) == (200, True, "", [])
    assert record.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert watch.tokens == {"k": 2}
    assert watch.ended == {"k"}
    assert record.sent <= record.first <= record.ended


async def test_events_cut_anywhere_are_whole() -> None:
    data = ONE + TWO + DONE
    record = await ask(chunked(*(data[i : i + 1] for i in range(len(data)))))
    assert len(record.events) == 2
    assert record.done


async def test_broken_framing_is_an_error_of_the_record() -> None:
    record = await ask(chunked(ONE, complete=False))
    assert "RemoteProtocolError" in record.error
    assert len(record.events) == 1
    assert not record.done


async def test_no_answer_is_an_error_of_the_record() -> None:
    record = await ask(b"")
    assert "RemoteProtocolError" in record.error
    assert record.status == 0


async def test_what_is_no_event_is_kept_and_comments_are_not() -> None:
    record = await ask(chunked(b": hello\n\n", b"event: x\n", ONE, DONE, TWO))
    assert record.stray == ["event: x", TWO.decode().strip()]
    assert len(record.events) == 1


async def test_a_unary_answer_is_kept_whole() -> None:
    record = await ask(plain(b'{"error":"x"}', "400 Bad Request"))
    assert (record.status, record.text, record.events) == (400, '{"error":"x"}', [])


async def test_a_watch_wakes_when_its_condition_holds(autojump_clock: trio.testing.MockClock) -> None:
    watch = Watch()
    woken: list[str] = []

    async def wait(name: str, streams: int, tokens: int) -> None:
        await watch.until(started(streams, tokens))
        woken.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "two streams", 2, 1)
        nursery.start_soon(wait, "ten tokens", 1, 10)
        await trio.testing.wait_all_tasks_blocked()
        watch.saw("a", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert woken == []
        watch.saw("b", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert woken == ["two streams"]
        watch.saw("a", 10)
    assert woken == ["two streams", "ten tokens"]
    await watch.until(started(2))


def test_a_watch_forgets_what_has_ended() -> None:
    watch = Watch()
    watch.saw("a", 4)
    watch.finish("a")
    watch.forget("a")
    watch.forget("unary, never seen")
    assert (watch.tokens, watch.ended) == ({}, set())
    assert not started(1)(watch)


async def test_clients_take_turns_and_think(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []

    async def send(http: object, url: str, plan: Plan, watch: Watch, begin: float) -> Record:
        begun.append(trio.current_time() - begin)
        await trio.sleep(2)
        return Record(plan.key, plan.body)

    monkeypatch.setattr(clients, "send", send)
    ended: list[tuple[str, Record | None]] = []
    some = crowd(ended, [Plan(str(number), {}) for number in range(5)], until=trio.current_time() + 8)
    await some.run()
    assert begun == pytest.approx([0, 0, 5, 5])  # the fifth would be sent too late
    assert sorted(key for key, record in ended if record is not None) == ["0", "1", "2", "3"]


async def test_clients_give_up_what_is_never_answered_once_nothing_befalls_anybody(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(*_: object) -> Record:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(clients, "send", send)
    ended: list[tuple[str, Record | None]] = []
    some = crowd(ended, [Plan("k", {})])
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(some.run)
        some.hold(True)
        await trio.sleep(1000)
        assert ended == []
        some.hold(False)
    assert ended == [("k", None)]
    assert trio.current_time() - begin == pytest.approx(1060)


def crowd(ended: list[tuple[str, Record | None]], plans: list[Plan], **more: Any) -> clients.Clients:
    """Two clients who think for three seconds."""
    return clients.Clients(
        "http://relay",
        iter(plans),
        2,
        Distribution(3, 3),
        Random(0),
        lambda plan, record: ended.append((plan.key, record)),
        trio.current_time(),
        patience=60.0,
        **more,
    )


def test_a_load_has_both_modes_and_every_variant() -> None:
    made = load.plans(24, 256, seed=3)
    assert len({plan.key for plan in made}) == 24
    assert sum(plan.body["stream"] for plan in made) == 12
    assert made == load.plans(24, 256, seed=3)
    for streaming in (True, False):
        mine = [plan.body for plan in made if plan.body["stream"] is streaming]
        assert sum("top_logprobs_num" in body for body in mine) == 4
        assert sum(body.get("logprob_start_len") == 0 for body in mine) == 4
        assert len({body["rid"] for body in mine if "rid" in body}) == 2
    assert all(3 <= token < 1024 for plan in made for token in plan.body["input_ids"])


async def test_metrics_are_read_and_summed() -> None:
    text = b'# TYPE a counter\na_total{reason="x"} 2.0\na_total{reason="y z"} 3.0\nb 0.0\na_total_other 7\n'
    async with serving({"/metrics": plain(text, content_type="text/plain")}) as url, load.client() as http:
        samples = await load.metrics(http, url)
    assert load.total(samples, "a_total") == 5
    assert samples["b"] == 0
