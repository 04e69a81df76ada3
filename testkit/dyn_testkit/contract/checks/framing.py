"""HTTP and server-sent events."""

from __future__ import annotations

import json
import re

import trio

from dyn_relay.net import Connection
from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import Broken, check, equal, expect, short

#: An event may come so much later, as a part of the whole time, than its tokens are due.
_LATE = 0.25
_TRIES = 3
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_FRAMING = re.compile(rb"(?i)(?:content-length|transfer-encoding)[ \t]*:")
_BLOCK = re.compile(rb"data: [^\n]+")


@check("§4.1, recorded")
async def unary_head(worker: Subject) -> None:
    """A unary answer is `application/json` with a content-length."""
    response = (await worker.ask("/generate", worker.body(2))).response
    equal("status", response.status, 200)
    equal("content type", response.header("content-type"), "application/json")
    equal("content-length", response.header("content-length"), str(len(response.body)))


@check("§4.2, http_server.py:949")
async def stream_head(worker: Subject) -> None:
    """A stream is 200, `text/event-stream; charset=utf-8`, chunked."""
    response = (await worker.ask("/generate", worker.body(2, stream=True))).response
    equal("status", response.status, 200)
    equal("content type", response.header("content-type"), "text/event-stream; charset=utf-8")
    equal("transfer-encoding", (response.header("transfer-encoding") or "").lower(), "chunked")


@check("RFC 9112 §6.3")
async def one_framing(worker: Subject) -> None:
    """A head says once how long the body is: one content-length, or one transfer-encoding, never both.

    Clients differ in what they make of two, and many refuse the answer.
    """
    refused = worker.body(1, sampling={"temperature": -1})
    for body in (worker.body(2), worker.body(2, stream=True), refused, refused | {"stream": True}):
        head = (await worker.ask("/generate", body)).response.wire.partition(b"\r\n\r\n")[0]
        found = [line.decode("latin-1") for line in head.split(b"\r\n") if _FRAMING.match(line)]
        expect(len(found) == 1, f"the head has {found or 'neither'}")


@check("RFC 9112 §2.1")
async def head_lines(worker: Subject) -> None:
    """A head begins with `HTTP/1.1`, and each of its lines ends with CR and LF."""
    for body in (worker.body(2), worker.body(2, stream=True)):
        wire = (await worker.ask("/generate", body)).response.wire
        expect(wire.startswith(b"HTTP/1.1 "), f"it begins with {short(wire[:20])}")
        head, end, _ = wire.partition(b"\r\n\r\n")
        bare = not end or b"\n" in head.replace(b"\r\n", b"")
        expect(not bare, f"a line ends with LF alone: {short(head)}")


@check("§4.2, http_server.py:949")
async def event_framing(worker: Subject) -> None:
    """A stream is nothing but `data: <one line>` and an empty line each: no comments, no `event:`, no `id:`."""
    body = (await worker.ask("/generate", worker.body(6, stream=True))).response.body
    expect(body.endswith(b"\n\n"), "the stream does not end with an empty line")
    for block in body[:-2].split(b"\n\n"):
        expect(_BLOCK.fullmatch(block) is not None, f"not one `data: ` line: {short(block)}")


@check("§4.2, http_server.py:949")
async def done_ends_a_stream(worker: Subject) -> None:
    """`data: [DONE]` comes once, last, after whole answers and after errors."""
    refused = worker.body(2, sampling={"temperature": -1})
    for body in (worker.body(3), refused):
        exchange = await worker.ask("/generate", body | {"stream": True})
        events = exchange.response.events()
        equal("how often [DONE] came", events.count(b"[DONE]"), 1)
        equal("the last event", events[-1], b"[DONE]")


@check("§4.2, srt/utils/json_response.py:9")
async def compact_json(worker: Subject) -> None:
    """JSON is compact: no blanks outside strings."""
    unary = (await worker.ask("/generate", worker.body(3, return_logprob=True))).response.body
    stream = (await worker.ask("/generate", worker.body(3, stream=True))).response.events()
    for text in (unary, *stream):
        expect(not re.search(rb"\s", _STRING.sub(b'""', text)), f"blanks in {short(text)}")


@check("§4.2")
async def stream_is_not_held_back(worker: Subject) -> None:
    """The events of a long stream come while the generation runs: the first one at once, half the tokens halfway.

    A busy machine may show it otherwise once; a worker that holds events back does so each time.
    """
    for _ in range(_TRIES):
        async with worker.live(worker.rid(), 0.5) as live:
            first, began = live.exchange.response.values()[0], trio.current_time()
            shown = await live.shows(live.count // 2)
            half = trio.current_time() - began
            await live.rest()
            whole = trio.current_time() - began
        equal("finish_reason of the first event", first["meta_info"]["finish_reason"], None)
        expect(first["meta_info"]["completion_tokens"] < live.count, "the first event has all tokens")
        if half <= (shown / live.count + _LATE) * whole:
            return
    raise Broken(f"{shown} of {live.count} tokens had come after {half:.2g} s, the rest of them after {whole:.2g} s")


@check("§1, uvicorn")
async def keep_alive(worker: Subject) -> None:
    """A connection serves one request after the other: unary, stream, refusal, information."""
    connection = await worker.dial()
    try:
        for _ in range(2):
            for path, body in (
                ("/generate", worker.body(2)),
                ("/generate", worker.body(2, stream=True)),
                ("/generate", b"{"),
                ("/model_info", None),
            ):
                response = (await worker.ask(path, body, over=connection)).response
                equal("status", response.status, 400 if body == b"{" else 200)
                closing = (response.header("connection") or "").lower() == "close"
                expect(not closing, "the answer says `connection: close`, which nobody asked for")
    finally:
        connection.close()


@check("RFC 9112 §9.6")
async def connection_close(worker: Subject) -> None:
    """An answer to `Connection: close` says so too, and after it the worker closes the connection."""
    for stream in (False, True):
        connection = await worker.dial()
        try:
            body = worker.body(2, stream=stream)
            exchange = await worker.ask("/generate", body, over=connection, headers={"connection": "close"})
            equal("connection", (exchange.response.header("connection") or "").lower(), "close")
            expect(await _closed(connection, worker.patience), f"it is still open after {worker.patience:g} s")
        finally:
            connection.close()


async def _closed(connection: Connection, seconds: float) -> bool:
    with trio.move_on_after(seconds):
        await connection.wait_closed()
        return True
    return False


@check("RFC 9110 §8.6")
async def content_is_utf8_json(worker: Subject) -> None:
    """Bodies are UTF-8 JSON without a byte order mark, and without NaN or Infinity."""

    def refuse(name: str) -> None:
        raise Broken(f"{name} in the answer")

    for stream in (False, True):
        response = (await worker.ask("/generate", worker.body(3, return_logprob=True, stream=stream))).response
        for text in response.events()[:-1] if stream else [response.body]:
            json.loads(text.decode("utf-8"), parse_constant=refuse)
