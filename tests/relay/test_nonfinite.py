"""F1: a worker that spells numbers which JSON has not: its client gets what it said, never a 500."""

from __future__ import annotations

import pytest

from tests.relay.harness import world
from tests.relay.odd import scripted

EVENT = b'{"output_ids":[1],"meta_info":{"id":"r","finish_reason":{"type":"length","length":1},"completion_tokens":1,'
EVENT += b'"odd":[NaN,-Infinity,null]}}'
STREAM = b"data: %b\n\ndata: [DONE]\n\n" % EVENT


@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 1}], ids=["migratable", "not"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_gets_them(autojump_clock, stream, params):
    """A worker that does not stream for a unary client, though asked to, too."""
    body = {"rid": "r", "input_ids": [5], "stream": stream, "sampling_params": {"max_new_tokens": 1, **params}}
    kind, wire = (b"text/event-stream", STREAM) if stream else (b"application/json", EVENT)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(wire))
    async with world(plans=[]) as w:
        await scripted(w, head + wire)
        response = await w.ask(body)
        assert (response.status, response.body) == (200, wire)
        assert response.header("x-dyn-relay-migratable") == ("no; reason=frequency_penalty" if params else "yes")


async def test_a_unary_answer_made_from_a_stream(autojump_clock):
    body = {"rid": "r", "input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(STREAM)
    async with world(plans=[]) as w:
        await scripted(w, head + STREAM)
        response = await w.ask(body)
        assert (response.status, response.body) == (200, EVENT)
