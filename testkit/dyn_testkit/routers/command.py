"""A router that is a program: started before some workers, gone when the block ends."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from dyn_testkit.factories import Endpoint

_LOOK = 0.05
#: s between SIGTERM and SIGKILL.
_GRACE = 2.0
#: Bytes of its output that are shown if it does not come to listen.
_TAIL = 2000


class NotListening(Exception):
    """The program has ended, or not listened in time; the message holds the end of its output."""


def expand(line: str, workers: Sequence[str], ports: Sequence[int]) -> list[str]:
    """The words of a command line, once for these workers.

    `{port}` is the port to listen on, `{spare}` another one that is free. A word `{workers}` becomes one word a worker;
    a word with `{worker}` in it is repeated for each. Raises `ValueError` for a line without its placeholders.
    """
    words = shlex.split(line)
    for wanted in (("{port}",), ("{workers}", "{worker}")):
        if not any(name in word for word in words for name in wanted):
            raise ValueError(f"the command has no {' or '.join(wanted)}: {line}")
    found: list[str] = []
    for word in words:
        filled = word.replace("{port}", str(ports[0])).replace("{spare}", str(ports[1]))
        if filled == "{workers}":
            found += workers
        elif "{worker}" in filled:
            found += [filled.replace("{worker}", url) for url in workers]
        else:
            found.append(filled)
    return found


@asynccontextmanager
async def program(line: str, seconds: float, workers: Sequence[str]) -> AsyncIterator[Endpoint]:
    """Run it, in a process group of its own, and wait until it listens, so many seconds at most.

    Raises `NotListening`, `OSError`, `ValueError`.
    """
    ports = _free_ports(2)
    words = expand(line, workers, ports)
    with tempfile.TemporaryFile() as output:
        process = await trio.lowlevel.open_process(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            began = trio.current_time()
            while not await _listens(ports[0]):
                why = ""
                if process.poll() is not None:
                    why = f"has ended with status {process.returncode}"
                elif trio.current_time() - began > seconds:
                    why = f"does not listen on 127.0.0.1:{ports[0]} after {seconds:g} s"
                if why:
                    output.seek(max(0, output.tell() - _TAIL))
                    said = output.read().decode("utf-8", "replace")
                    raise NotListening(f"{words[0]} {why}. It said:\n{said}")
                await trio.sleep(_LOOK)
            yield Endpoint(f"http://127.0.0.1:{ports[0]}")
        finally:
            with trio.CancelScope(shield=True):
                await _stop(process)


async def _stop(process: trio.Process) -> None:
    for what in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, what)
        with trio.move_on_after(_GRACE):
            await process.wait()
            return


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


async def _listens(port: int) -> bool:
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
    except OSError:
        return False
    await stream.aclose()
    return True
