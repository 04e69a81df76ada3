"""A log that cannot be written: what is served goes on, and what is lost is counted and told."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import BinaryIO

import pytest
import trio

from dyn_testkit.relay import until
from tests.process.kit import ENV, RELAY, WORKER, Call, post, started
from tests.process.test_kill import body
from tests.process.test_processes import children, exact, holder, loaded, local, metrics, scrape

#: s; a proxy that waits for its log answers never.
PATIENCE = 120.0
DROPPED = "dyn_relay_log_lines_dropped_total"

several = pytest.mark.parametrize("processes", [1, 3])


@pytest.fixture
def full() -> Iterator[int]:
    with open("/dev/full", "wb") as file:
        yield file.fileno()


@asynccontextmanager
async def serving(processes, stderr):
    """A worker, and a proxy whose log goes to `stderr`."""
    with trio.fail_after(PATIENCE):
        async with started(WORKER) as worker:
            flags = ["--port", 0, "--log-json", "--worker-urls", worker.url, "--processes", processes]
            async with started(RELAY, "serve", *flags, stderr=stderr) as relay:
                yield worker, relay


@contextmanager
def pipe() -> Iterator[tuple[BinaryIO, int]]:
    """What reads, and the descriptor to write to."""
    taken, given = os.pipe()
    with open(taken, "rb") as reader, open(given, "wb", buffering=0):
        yield reader, given


def fill(given):
    """Until the pipe takes no more."""
    os.set_blocking(given, False)
    try:
        while True:
            os.write(given, b" ")
    except BlockingIOError:
        os.set_blocking(given, True)


async def row(reader, **wanted):
    """The first line of the log with these values."""
    while True:
        line = await trio.to_thread.run_sync(reader.readline, abandon_on_cancel=True)
        if wanted.items() <= (found := json.loads(line)).items():
            return found


async def dropped(relay, processes):
    if processes > 1:
        return (await scrape(relay, processes))[DROPPED]
    return metrics(await (await Call.post(relay, {}, "/metrics", method="GET")).rest())[DROPPED]


async def alive(relay):
    assert (await (await Call.post(relay, {}, "/liveness", method="GET")).rest()).status == 200


async def refuse(relay):
    """A request that ends at once, with a line of the log."""
    assert (await (await Call.post(relay, {"input_ids": "none"})).rest()).status == 400


async def live_streams(worker, relay):
    """Eight that go on once the worker does."""
    requests = [body(number, 30, stream=True) for number in range(8)]
    await post(worker, "/pause_generation", {"mode": "in_place"})
    calls = [await Call.post(relay, request) for request in requests]
    await loaded(relay, len(calls))
    return list(zip(requests, calls, strict=True))


async def finish(worker, streams):
    await post(worker, "/continue_generation", {})
    for request, call in streams:
        await exact(request, call)


async def stop(relay):
    relay.process.terminate()
    assert await relay.process.wait() == 0


@several
async def test_its_reader_dies(processes):
    with pipe() as (reader, given):
        async with serving(processes, given) as (worker, relay):
            streams = await live_streams(worker, relay)
            before = children(relay)
            reader.close()
            while not await dropped(relay, processes):
                await refuse(relay)
            await finish(worker, streams)
            assert children(relay) == before
            await stop(relay)


@several
async def test_its_reader_stalls(processes):
    """From the start on. It gets all lines in the end."""
    with pipe() as (reader, given):
        fill(given)
        async with serving(processes, given) as (worker, relay):
            streams = await live_streams(worker, relay)
            for _ in range(10):
                await refuse(relay)
                await alive(relay)
            await finish(worker, streams)
            ended = {(await row(reader, outcome="done"))["rid"] for _ in streams}
            assert ended == {request["rid"] for request, _ in streams}
            await stop(relay)


@several
async def test_it_stops_before_a_reader_that_stalls(processes):
    with pipe() as (_, given):
        fill(given)
        async with serving(processes, given) as (_, relay):
            await refuse(relay)
            await stop(relay)


@several
async def test_its_disk_is_full(processes, full):
    async with serving(processes, full) as (worker, relay):
        streams = await live_streams(worker, relay)
        while not await dropped(relay, processes):
            await refuse(relay)
        await finish(worker, streams)
        await stop(relay)


async def test_its_file_reaches_a_limit_that_is_lifted(tmp_path):
    path = tmp_path / "log"
    with path.open("ab") as file:
        async with serving(1, file.fileno()) as (worker, relay):
            streams = await live_streams(worker, relay)
            pid = relay.process.pid
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (path.stat().st_size + 20, resource.RLIM_INFINITY))
            while await dropped(relay, 1) < 3:
                await refuse(relay)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
            await finish(worker, streams)
            await until(lambda: b"log lines were lost" in path.read_bytes())
            lost = await dropped(relay, 1)
            await stop(relay)
    rows, torn = [], 0
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            torn += 1
    assert torn <= 1  # what was there when the limit was reached
    [told] = [row for row in rows if row["event"] == "log lines were lost"]
    assert told["lines"] == lost
    ended = {row["rid"] for row in rows if row.get("outcome") == "done"}
    assert ended == {request["rid"] for request, _ in streams}


async def test_a_process_is_replaced_while_the_log_stalls():
    """The supervisor forks while its own line waits, and the newcomer has a log all the same."""
    with pipe() as (reader, given):
        fill(given)
        async with serving(2, given) as (worker, relay):
            before = children(relay)
            os.kill(before[0], signal.SIGKILL)
            await until(lambda: len(children(relay)) == 2 and before[0] not in children(relay))
            [newcomer] = set(children(relay)) - set(before)
            await post(worker, "/pause_generation", {"mode": "in_place"})
            streams = []
            while newcomer not in (held := holder(children(relay), relay.port)).values():
                request = body(len(streams), 8, stream=True)
                streams.append((request, await Call.post(relay, request)))
            # More than one where earlier ones were accepted late.
            its = {request["rid"] for request, call in streams if held.get(local(call)) == newcomer}
            await finish(worker, streams)
            while its:
                its.discard((await row(reader, outcome="done"))["rid"])
            await stop(relay)


@several
@pytest.mark.parametrize("what", ["gone", "full", "stalled", "closed"])
async def test_nobody_is_told_where_it_listens(processes, what, full):
    with (
        socket.socket() as reserved,
        pipe() as (reader, given),
        trio.fail_after(PATIENCE),
    ):
        # Bound but not listening: nobody else gets the port, and the proxy does.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        if what == "gone":
            reader.close()
        if what == "stalled":
            fill(given)
        command = [*RELAY, "serve", "--port", str(port), "--processes", str(processes)]
        if what == "closed":
            command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
        process = await trio.lowlevel.open_process(
            command, stdout=full if what == "full" else given, stderr=subprocess.DEVNULL, env=ENV
        )
        try:
            while True:
                try:
                    stream = await trio.open_tcp_stream("127.0.0.1", port)
                    break
                except OSError:
                    assert process.returncode is None
            await stream.send_all(b"GET /liveness HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
            await stream.aclose()
            process.terminate()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
