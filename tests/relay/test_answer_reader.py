"""The reader of an attempt's answer: what the client gets does not depend on how the worker's bytes were cut."""

from __future__ import annotations

import itertools
import json
from typing import Any, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dyn_relay.formats.base import NativeRequest
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import Traits
from dyn_relay.http11.errors import EventTooLarge
from dyn_relay.http11.server import Limits, ServerConnection
from dyn_relay.net import Connection
from dyn_relay.relay.downstream import Downstream
from dyn_relay.relay.reader import AnswerReader

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKENS = 12


class _Client:
    peer = "client"
    pending = False


def events(*, cumulative: bool, tokens: int = TOKENS) -> list[bytes]:
    """Each as an engine writes it: one chunk."""
    chunks = []
    for total in range(1, tokens + 1):
        ids = list(range(100 if cumulative else 99 + total, 100 + total))
        meta: dict[str, Any] = {"id": "r", "finish_reason": None, "prompt_tokens": 2, "completion_tokens": total}
        meta["finish_reason"] = {"type": "length", "length": tokens} if total == tokens else None
        chunks.append(
            b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode() + b"\n\n"
        )
    return [b"%x\r\n%b\r\n" % (len(data), data) for data in [*chunks, b"data: [DONE]\n\n"]]


def reader(*, stream: bool = True, max_event: int = 1 << 27, rest: float = 0.0) -> AnswerReader:
    body = {"rid": "r", "input_ids": [1, 2], "stream": stream, "sampling_params": {"max_new_tokens": TOKENS}}
    exchange = SglangFormat().open(NativeRequest("POST", "/generate", [], json.dumps(body).encode()), "given")
    traits = Traits(sampling_defaults={})
    exchange.admit(traits)
    exchange.dispatch(traits, "r", 0.0)
    downstream = Downstream(ServerConnection(cast(Connection, _Client()), Limits()))
    return AnswerReader(exchange, downstream, no_body=False, max_event=max_event, on_token=lambda: None, rest=rest)


def body_of(answer: bytes) -> bytes:
    """The body of a chunked answer."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(place % len(data) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


@settings(max_examples=200)
@given(cumulative=st.booleans(), places=st.lists(st.integers(0, 1 << 16), max_size=30))
async def test_however_the_bytes_are_cut(cumulative: bool, places: list[int]) -> None:
    chunks = events(cumulative=cumulative)
    stream = HEAD + b"".join(chunks) + b"0\r\n\r\n"
    one = reader()
    out = b"".join(one.feed(piece) for piece in cut(stream, places) if not one.done)
    assert body_of(out) == body_of(stream)
    assert one.done


@pytest.mark.parametrize("cumulative", [True, False])
async def test_an_event_in_a_chunk_of_its_own_passes_as_it_is(autojump_clock: object, cumulative: bool) -> None:
    one = reader()
    one.feed(HEAD)
    for number, chunk in enumerate(events(cumulative=cumulative)[:-2]):
        await trio.sleep(1)
        out = one.feed(chunk)
        if number > 1:
            assert out is chunk  # not even a copy
        assert one.last_token == one.last_event == trio.current_time()
    assert one.first_token == trio.current_time() - TOKENS + 2


async def test_a_quick_event_has_the_same_limit(autojump_clock: object) -> None:
    chunks = events(cumulative=True)
    one = reader(max_event=len(chunks[-3]) - 7)
    one.feed(HEAD)
    for chunk in chunks[:-3]:
        one.feed(chunk)
    assert one.last_token is not None
    with pytest.raises(EventTooLarge):
        one.feed(chunks[-3])


async def test_a_unary_client_gets_nothing_of_events() -> None:
    one = reader(stream=False)
    assert b"".join(map(one.feed, [HEAD, *events(cumulative=True)])) == b""
    assert one.done


async def test_half_an_event_is_no_reason_to_pass_the_next() -> None:
    """What follows a half event in a chunk of its own belongs to it."""
    chunks = events(cumulative=False)
    one = reader()
    for chunk in [HEAD, *chunks[:4]]:
        one.feed(chunk)
    half = b"data: {\n"
    assert one.feed(b"%x\r\n%b\r\n" % (len(half), half)) == b""
    assert one.feed(chunks[4]) == b""  # its payload is the second line of an event that is no JSON
    assert one.done


@pytest.mark.parametrize(("stream", "status", "rests"), [(True, 200, True), (False, 200, False), (True, 503, False)])
async def test_only_events_for_a_streaming_client_let_the_worker_rest(stream: bool, status: int, rests: bool) -> None:
    one = reader(stream=stream, rest=0.5)
    assert one.rest == 0
    one.feed(HEAD.replace(b"200", b"%d" % status))
    assert one.rest == (0.5 if rests else 0)
