"""The HTTP side of a worker: its connections, one request after the other on each."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import trio

from dyn_relay.net import Connection, ConnectionBroken
from dyn_testkit.faults import Fault, Seen, parse_fault
from dyn_testkit.worker.contract import Poisoned, error_object
from dyn_testkit.worker.control import ROUTES, authorize, method_refused
from dyn_testkit.worker.generate import Generator
from dyn_testkit.worker.inject import AnswerCut, HttpInjector
from dyn_testkit.worker.wire import TEXT, BadRequest, Reply, Request, keeps_alive, read_request, reply_bytes

if TYPE_CHECKING:
    from dyn_testkit.worker.core import MockWorker


async def serve(worker: MockWorker, connection: Connection, index: int) -> None:
    """Serve a connection until it ends. Raises `AnswerCut`, `dyn_relay.net.ConnectionBroken`."""
    fault = worker.faults.for_connection(index)
    if fault is not None:
        await _injector(worker, fault, Seen(index), connection, streaming=False).at(fault.where.spot)
    leftover = b""
    idle_limit = math.inf
    while True:
        try:
            if not leftover:
                with trio.move_on_after(idle_limit):
                    leftover = await connection.receive()
            got = await read_request(connection, leftover) if leftover else None
        except BadRequest:
            reply = Reply(400, b"Invalid HTTP request received.", TEXT)
            await connection.send(reply_bytes(reply, worker.renderer.wall(), keep=False))
            return
        if got is None:
            return
        request, leftover = got
        idle_limit = worker.options.keep_alive
        worker.record(request, index)
        keep = keeps_alive(request)
        await _answer(worker, connection, request, keep)
        if not keep:
            return


def _injector(
    worker: MockWorker, fault: Fault | None, seen: Seen, connection: Connection, *, streaming: bool
) -> HttpInjector:
    return HttpInjector(
        fault=fault,
        seen=seen,
        plan=worker.faults,
        kill_worker=worker.die,
        connection=connection,
        wall=worker.renderer.wall,
        streaming=streaming,
    )


async def _answer(worker: MockWorker, connection: Connection, request: Request, keep: bool) -> None:
    refusal = authorize(worker, request) or method_refused(request)
    if refusal is None and request.path == "/generate":
        await _generate(worker, connection, request, keep)
        return
    reply = refusal or await ROUTES[request.path][2](worker, request)
    await connection.send(reply_bytes(reply, worker.renderer.wall(), keep, request.method != "HEAD"))


async def _generate(worker: MockWorker, connection: Connection, request: Request, keep: bool) -> None:
    """Answer a generation, and drop it if the client goes away meanwhile."""
    gone = cut = False

    async def watch() -> None:
        nonlocal gone
        await connection.wait_closed()
        gone = True
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            await _generate_watched(worker, connection, request, keep)
        except AnswerCut:
            cut = True
        except ConnectionBroken:
            gone = True
        nursery.cancel_scope.cancel()
    if cut:
        raise AnswerCut
    if gone:
        worker.record_disconnect()
        raise AnswerCut


async def _generate_watched(worker: MockWorker, connection: Connection, request: Request, keep: bool) -> None:
    rid, streaming = _glance(request.body)
    seen = Seen(len(worker.generates) - 1, rid, request.body)
    fault = worker.faults.for_request(seen)
    asked = request.header(b"x-mock-fault")
    if asked is not None and worker.options.allow_header_faults:
        try:
            fault = parse_fault(asked.decode())
        except ValueError as exc:
            reply = error_object(400, f"x-mock-fault: {exc}")
            await connection.send(reply_bytes(reply, worker.renderer.wall(), keep))
            return
    inject = _injector(worker, fault, seen, connection, streaming=streaming)
    try:
        await Generator(worker.manager).serve(connection, request, inject, keep)
    except Poisoned:
        await trio.sleep(worker.options.death_delay)
        worker.die()
        await trio.lowlevel.checkpoint()


def _glance(body: bytes) -> tuple[str, bool]:
    """The rid and the stream flag of a body, whatever it is."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return "", False
    if not isinstance(value, dict):
        return "", False
    rid = value.get("rid")
    return rid if isinstance(rid, str) else "", value.get("stream") is True
