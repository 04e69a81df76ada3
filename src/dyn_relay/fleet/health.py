"""Probing one worker, for as long as it is in the fleet.

One task a worker, so that at most one probe is in flight. SGLang 0.5.23's `/health` generates a token: it takes a
second when idle, up to twenty when busy, and fails then although the engine is fine. So nothing here touches a live
stream.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
import trio

from dyn_relay.config import Config
from dyn_relay.fleet import contradictions
from dyn_relay.fleet.keeper import Keeper
from dyn_relay.fleet.rejoin import Standing
from dyn_relay.fleet.worker import Signal, State, Worker
from dyn_relay.formats.base import Format, Headers
from dyn_relay.formats.traits import UNKNOWN, Traits
from dyn_relay.http11.client import BadResponse, Origin, Pool, Response
from dyn_relay.net import ConnectFailed, ConnectionBroken

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("fleet")

#: Longest pause while the next probe may change what the worker gets, in seconds.
QUICK = 1.0
#: An info endpoint answers from memory; SGLang serves it also while its scheduler is busy.
INFO_TIMEOUT = 5.0
#: Time that a worker which failed an attempt gets to show that it lives.
LIFE_SIGN_TIMEOUT = 2.0
#: Seconds for which what was read of them counts as news, however many ask.
NEWS = 1.0
#: A ready worker's infos are read again after so many good probes: weights are updated in place. If they decide who
#: may serve, after each.
REREAD = 6


class Fetch(Protocol):
    """`http11.client.fetch`, as far as it is used here."""

    async def __call__(
        self, pool: Pool, origin: Origin, method: str, path: str, *, headers: Headers, timeout: float
    ) -> Response:
        """Ask once. Raises `ConnectFailed`, `ConnectionBroken`, `BadResponse`, `trio.TooSlowError`."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What one probe saw."""

    ok: bool
    #: There was an answer, be it not a good one: a draining engine says 503, and works on.
    answered: bool = False
    #: No connection could be made: the engine's process does not listen.
    refused: bool = False
    #: What was seen, for people.
    cause: str = ""


class Examiner:
    """How workers are asked: with what, for how long, under which key."""

    def __init__(self, config: Config, format: Format, pool: Pool, fetch: Fetch) -> None:
        self.config = config
        self._format = format
        self._pool = pool
        self._fetch = fetch
        key = config.worker_api_key
        self._headers: Headers = [(b"authorization", b"Bearer " + key.encode())] if key else []

    async def probe(self, worker: Worker) -> Probe:
        """Ask the health endpoint once; any 2xx is well."""
        answer = await self._get(worker, self.config.health_check_endpoint, self.config.health_check_timeout_secs)
        if isinstance(answer, Probe):
            return answer
        well = 200 <= answer.status < 300
        return Probe(well, answered=True, cause=f"{self.config.health_check_endpoint} gave {answer.status}")

    async def learn(self, worker: Worker) -> None:
        """Read the worker's info endpoints into its traits. One that has none stays usable, with unknown traits."""
        infos: dict[str, bytes] = {}
        unread = locked = False
        for path in self._format.info_paths:
            answer = await self._get(worker, path, INFO_TIMEOUT)
            if isinstance(answer, Probe):
                if answer.refused:
                    return
                unread = True
                log.warning("worker's info cannot be read", worker=worker.id, path=path, cause=answer.cause)
            elif answer.status in (401, 403):
                locked = True
                log.error("worker refuses the key; see --worker-api-key", worker=worker.id, path=path)
            elif answer.status == 200:
                infos[path] = answer.body
        worker.locked = locked or (unread and worker.locked)
        if unread and worker.traits != UNKNOWN:
            return  # what was read before is better than half of it
        try:
            traits = self._named(self._format.traits(infos))
        except Exception as exc:
            # A worker's odd answer must not end its probing.
            log.error("worker's infos make no sense", worker=worker.id, error=repr(exc))
            return
        if traits != worker.traits:
            log.info(
                "worker described",
                worker=worker.id,
                version=traits.version,
                weights=traits.weight_version,
                tool_call_parser=traits.tool_call_parser,
                reasoning_parser=traits.reasoning_parser,
            )
        worker.traits = traits
        if self.config.dp_aware:
            worker.divide(traits.dp_size or 1)
        worker.learnt = True
        contradictions.note(worker)

    def _named(self, traits: Traits) -> Traits:
        """With the parsers that the configuration names."""
        config = self.config
        return replace(
            traits,
            tool_call_parser=config.dyn_tool_call_parser or traits.tool_call_parser,
            reasoning_parser=config.dyn_reasoning_parser or traits.reasoning_parser,
        )

    async def lives(self, worker: Worker) -> bool:
        """Does it answer at all, whatever the status? The info endpoint answers from memory, also while it is busy."""
        return isinstance(await self._get(worker, self._format.info_paths[0], LIFE_SIGN_TIMEOUT), Response)

    async def paused(self, worker: Worker) -> bool:
        """Does it say that somebody has paused it? One that does not answer is not."""
        answer = await self._get(worker, self._format.ready_path, INFO_TIMEOUT)
        return isinstance(answer, Response) and answer.status == 503

    async def _get(self, worker: Worker, path: str, timeout: float) -> Response | Probe:
        try:
            return await self._fetch(
                self._pool, worker.origin, "GET", path, headers=list(self._headers), timeout=timeout
            )
        except ConnectFailed as exc:
            return Probe(False, refused=True, cause=str(exc))
        except trio.TooSlowError:
            return Probe(False, cause=f"{path} took more than {timeout:g} s")
        except (ConnectionBroken, BadResponse) as exc:
            return Probe(False, cause=f"{path}: {exc}")


class Watch:
    """The probing of one worker."""

    def __init__(self, worker: Worker, examiner: Examiner, clock: Callable[[], float], keeper: Keeper) -> None:
        self.worker = worker
        self._examiner = examiner
        self._clock = clock
        self._keeper = keeper
        self._rereads = 1 if examiner.config.rejoin != "always" else REREAD
        self._wake = trio.Event()
        self._scope = trio.CancelScope()
        self._asking = trio.lowlevel.ParkingLot()
        self._begun = 0  # probes begun
        self._last: tuple[int, Probe] = (0, Probe(False, cause="never probed"))
        self._alarmed = False  # a request failed since the current probe began
        self._until_reread = self._rereads
        self._ended = False
        self._questioning = trio.Lock()
        self._answered_at = -math.inf
        self._lives = True
        self._learning = trio.Lock()
        self._learnt_at = -math.inf

    async def run(self) -> None:
        """Probe until `stop`."""
        try:
            with self._scope:
                await self._survive(self._learn())
                while True:
                    self._wake = trio.Event()
                    await self._survive(self._probe())
                    with trio.move_on_after(self._pause()):
                        await self._wake.wait()
        finally:
            self._ended = True
            self._asking.unpark_all()

    async def _survive(self, work: Awaitable[None]) -> None:
        """A defect met in probing one worker must not take the others' requests down."""
        try:
            await work
        except Exception as exc:
            log.error("a probe failed because of a defect of the proxy", worker=self.worker.id, exc_info=exc)

    def stop(self) -> None:
        """End the probing for good."""
        self._scope.cancel()

    def alarm(self) -> None:
        """A request failed: probe at once, and do not let the probe in flight clear the worker."""
        self._alarmed = True
        self._wake.set()

    async def ask(self) -> Probe:
        """What a probe says that begins now or later, or one in flight if it fails. Not well if the probing ends."""
        wanted, before = self._begun + 1, self._last[0]
        self._wake.set()
        while not self._ended:
            number, probe = self._last
            if number >= wanted or (number > before and not probe.ok):
                return probe
            await self._asking.park()
        return Probe(False, cause="no longer probed")

    async def lives(self) -> bool:
        """Does the worker answer at all? One question is in flight, however many ask."""
        async with self._questioning:
            if self._clock() - self._answered_at >= LIFE_SIGN_TIMEOUT:
                self._lives = await self._examiner.lives(self.worker)
                self._answered_at = self._clock()
            return self._lives

    async def relearn(self) -> None:
        """Read its infos now; one that asks while another does has what that one reads."""
        async with self._learning:
            if self._clock() - self._learnt_at >= NEWS:
                await self._survive(self._learn())
                self._learnt_at = self._clock()
                if self.worker.state is State.STARTING:
                    self._wake.set()  # a new process: the probe that it needs must not wait for its turn

    async def _learn(self) -> None:
        self._until_reread = self._rereads
        await self._examiner.learn(self.worker)
        self._keeper.identify(self.worker)

    async def _probe(self) -> None:
        self._begun += 1
        self._alarmed = False
        probe = await self._examiner.probe(self.worker)
        self._last = (self._begun, probe)
        self._asking.unpark_all()
        if probe.ok and not (self.worker.learnt and self.worker.standing is Standing.KNOWN):
            # Before anybody else is sent there: it may be a new process.
            await self._learn()
            if not self._alarmed:
                await self._keeper.vet(self.worker)
        elif probe.ok:
            self._until_reread -= 1
        self._judge(probe)
        if self._until_reread <= 0:
            await self._learn()

    def _judge(self, probe: Probe) -> None:
        worker, config, keeper = self.worker, self._examiner.config, self._keeper
        worker.answers = probe.answered
        keeper.pass_time(worker)
        if probe.ok:
            if self._alarmed:
                return
            worker.good_probes, worker.bad_probes = worker.good_probes + 1, 0
            enough = worker.good_probes >= config.health_success_threshold
            signal = Signal.RECOVERED if enough else Signal.PROBE_OK
        else:
            worker.good_probes, worker.bad_probes = 0, worker.bad_probes + 1
            worker.learnt = False  # what answers next may be a new process with other weights
            signal = Signal.PROBE_FAILED
            if worker.bad_probes >= config.health_failure_threshold:
                signal = Signal.GONE if probe.refused else Signal.UNHEALTHY
        keeper.move(worker, signal, probe.cause)

    def _pause(self) -> float:
        """Seconds to the next probe: quick while it is awaited, else the interval."""
        worker, interval = self.worker, self._examiner.config.health_check_interval_secs
        returning = worker.state in (State.UNREADY, State.DEAD) and worker.good_probes > 0
        awaited = returning or worker.state in (State.STARTING, State.SUSPECT)
        return min(interval, QUICK) if awaited else interval
