"""`--processes N`: a process that serves nothing itself, and starts, watches and ends those that do.

Each child has an event loop, a fleet and a listening socket of its own; by SO_REUSEPORT Linux spreads the connections
over them. Here is no event loop, so that forking is safe at any time: one `select` over signals and reports. The only
other thread writes the log (`observe.lines`), and what it may hold at that time is made anew in the child.

Signals are for the supervisor. Children ignore SIGTERM and SIGINT, which a terminal or an init system sends to the
whole group, and take their orders from a pipe; so what is sent to all counts once. If the supervisor dies, the pipes
end, and the children drain.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import trio

from dyn_relay.app import Seat, location, run
from dyn_relay.config import Config
from dyn_relay.observe import log as logs

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("supervisor")

#: Seconds before a dead child is replaced, doubled for each one that did not live for `STABLE` seconds.
BACKOFF = 0.1
STABLE = 10.0
#: So many of these in a row, and it is not worth another try.
HOPELESS = 5

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: What is written to a child: the first time it drains, the second time it ends.
_ORDER = b"."


class PipeOrders:
    """A child's `app.Orders`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def drain(self) -> None:
        """The order has come, or the supervisor has died."""
        await self._read()

    async def end(self) -> None:
        """The order has come. A dead supervisor gives none."""
        if not await self._read():
            await trio.sleep_forever()

    async def _read(self) -> bytes:
        await trio.lowlevel.wait_readable(self._descriptor)
        return os.read(self._descriptor, 1)


@dataclass(slots=True)
class _Child:
    pid: int
    #: Where its orders are written.
    orders: int
    since: float


class Supervisor:
    """Runs `config.processes` children until it is told to stop; `run` gives the exit code."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._children: dict[int, _Child] = {}
        #: When those that have died are replaced.
        self._due: dict[int, float] = {}
        #: Early deaths in a row, by number.
        self._deaths = dict.fromkeys(range(config.processes), 0)
        self._started = 0
        #: Those that have not listened yet; None once all have, and it was said.
        self._awaited: set[int] | None = set(range(config.processes))
        #: Signals to stop, so far.
        self._told = 0
        self._code = 0

    def run(self) -> int:
        """0 if all live requests have ended in peace."""
        logs.setup(self._config.log_level, self._config.log_json)
        with ExitStack() as stack:
            option = f"host {self._config.host}, port {self._config.port}"
            try:
                port = stack.enter_context(reserved(self._config.host, self._config.port))
                option = "processes"  # their directory
                self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dyn-relay-")))
            except (OSError, UnicodeError) as exc:  # the latter: a host name that cannot be encoded
                log.error("cannot start", option=option, error=str(exc))
                return 1
            self._host, self._port = port.getsockname()[:2]
            self._reserved = port
            self._signals = stack.enter_context(_signals())
            self._reports, self._report = os.pipe()
            os.set_blocking(self._reports, False)
            for number in self._deaths:
                self._start(number, replacement=False)
            while self._children or self._due:
                self._step()
        return self._code

    def _step(self) -> None:
        wait = min(self._due.values(), default=None)
        timeout = None if wait is None else max(0.0, wait - time.monotonic())
        readable, _, _ = select.select([self._signals, self._reports], [], [], timeout)
        if self._reports in readable:
            self._listening(os.read(self._reports, 64))
        if self._signals in readable:
            for number in os.read(self._signals, 64):
                if number in _SIGNALS:
                    self._stop()
        self._reap()
        for number, due in list(self._due.items()):
            if due <= time.monotonic():
                del self._due[number]
                self._start(number, replacement=True)

    # -- children

    def _start(self, number: int, *, replacement: bool) -> None:
        taken, given = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # one that the child got before it ignores them would count
        pid = os.fork()
        if pid == 0:
            self._serve(number, taken, [given, *(child.orders for child in self._children.values())], replacement)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(taken)
        self._started += 1
        self._children[number] = _Child(pid, given, time.monotonic())
        log.info("process started", process=number, pid=pid, replacement=replacement)

    def _serve(self, number: int, orders: int, others: list[int], replacement: bool) -> None:
        """The child's life; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for one in _SIGNALS:
                signal.signal(one, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            for descriptor in (*others, self._reports, self._signals, self._reserved.detach()):
                os.close(descriptor)
            # Each life of each child has a chance of its own, or they would give the same names to their attempts.
            seed = None if self._config.seed is None else self._config.seed + self._started
            seat = Seat(
                number=number,
                directory=self._directory,
                replacement=replacement,
                orders=PipeOrders(orders),
                listening=lambda: os.write(self._report, bytes([number])),
            )
            code = trio.run(run, replace(self._config, port=self._port, seed=seed), seat)
        except BaseException:
            log.exception("the process failed", process=number)
        finally:
            logs.flush()
            os._exit(code)

    def _listening(self, numbers: bytes) -> None:
        if self._awaited is None:
            return
        self._awaited -= set(numbers)
        if not self._awaited:
            self._awaited = None
            logs.say(f"listening on {location(self._host, self._port)}")

    def _reap(self) -> None:
        for number, child in list(self._children.items()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                os.close(child.orders)
                del self._children[number]
                self._ended(number, os.waitstatus_to_exitcode(status), time.monotonic() - child.since)

    def _ended(self, number: int, code: int, lived: float) -> None:
        if self._told:
            log.info("process ended", process=number, code=code)
            self._code = self._code or int(code != 0)
            return
        deaths = self._deaths[number] = 1 if lived >= STABLE else self._deaths[number] + 1
        log.error("process died", process=number, code=code, lived=round(lived, 3), deaths=deaths)
        if deaths < HOPELESS:
            self._due[number] = time.monotonic() + BACKOFF * 2.0 ** (deaths - 1)
            return
        log.error("a process dies again and again: giving up", process=number)
        self._code = 1
        self._stop()

    def _stop(self) -> None:
        """The first time all are told to drain, the second time to end."""
        self._told += 1
        self._due.clear()
        for child in self._children.values():
            try:
                os.write(child.orders, _ORDER)
            except BrokenPipeError:
                pass  # it has just died


def supervise(config: Config) -> int:
    """Serve with `config.processes` processes; returns the exit code."""
    return Supervisor(config).run()


@contextmanager
def reserved(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound and never listens: nobody else gets the port while no child has it.

    Raises `OSError`, and `UnicodeError` for a host name that cannot be encoded.

    By SO_REUSEPORT alone a second proxy of the same user would share the port of the first one in silence, so it is
    asked without that first.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    name = host.encode("idna")  # as trio does it in the children
    with socket.socket(family) as alone:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind((name, port))
    with socket.socket(family) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((name, port))
        yield held


@contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that gives the number of each signal, as a byte. It is the process's end, too: nothing is undone."""
    taken, given = os.pipe()
    os.set_blocking(given, False)
    for one in (*_SIGNALS, signal.SIGCHLD):
        signal.signal(one, lambda number, frame: None)
    signal.set_wakeup_fd(given)
    yield taken
