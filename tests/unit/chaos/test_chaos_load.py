"""The client records what it saw, whatever that was, and campaigns can wait for what clients see."""

from __future__ import annotations

import json

import trio
from chaos_http import chunked, plain, serving

from dyn_chaos import load
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
