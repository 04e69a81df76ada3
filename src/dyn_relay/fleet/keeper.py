"""What moves workers from state to state: probes, attempts, time, and people. The table is in `worker.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from dyn_relay.config import Config
from dyn_relay.fleet.rejoin import Standing, judge
from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import Signal, State, Worker

#: Seconds for which a queue is taken to be full if its engine does not say how long, and the most that it may say.
FULL_FOR, FULL_AT_MOST = 1.0, 30.0


class Keeper:
    """Keeps the states.

    `staying`: the workers that are not leaving; `relearn` reads the infos of some. `moved` is called with a worker and
    the state that it had; `renewed` with one that is dead or a new process.
    """

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float],
        staying: Callable[[], Iterable[Worker]],
        relearn: Callable[[Iterable[Worker]], Awaitable[None]],
        moved: Callable[[Worker, State], None],
        renewed: Callable[[Worker], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._staying = staying
        self._relearn = relearn
        self._moved = moved
        self._renewed = renewed
        self._gated = config.rejoin != "always"

    def move(self, worker: Worker, signal: Signal, cause: str = "") -> bool:
        """Move it by the table; True if its state changed. `cause`: what was seen."""
        before = worker.state
        if not worker.apply(signal, cause, self._clock()):
            return False
        if worker.state is State.DEAD:
            self.away(worker)
        self._moved(worker, before)
        return True

    # -- attempts

    def ended_well(self, worker: Worker) -> None:
        """An attempt did."""
        closes = worker.breaker.success()
        on_trial = worker.state is State.HALF_OPEN
        self.move(worker, Signal.PASSED if on_trial and closes else Signal.WORKED)

    def failed(self, worker: Worker, cause: str, *, key_refused: bool) -> bool:
        """It has failed an attempt; True if its state changed. That it refuses our key is no incident."""
        if key_refused:
            return self.move(worker, Signal.KEY_REFUSED, cause)
        opens = worker.healthy and worker.breaker.incident()
        return self.move(worker, Signal.TRIPPED if opens else Signal.FAILED, cause)

    def full(self, target: Target, seconds: float | None) -> None:
        """Its queue is, for so many seconds as it says itself, if it does."""
        worker, now = target.worker, self._clock()
        target.full_until = now + min(FULL_FOR if seconds is None else seconds, FULL_AT_MOST)
        if worker.full(now):
            self.move(worker, Signal.FULL)

    # -- time

    def pass_time(self, worker: Worker) -> None:
        """Do what is due."""
        now, config, state = self._clock(), self._config, worker.state
        waited = now - worker.since
        if state is State.BUSY and not worker.full(now):
            self.move(worker, Signal.FREE)
        elif state is State.OPEN and waited >= config.cb_timeout_duration_secs:
            self.move(worker, Signal.TRIAL)
        elif state is State.SUSPECT and waited >= config.inhibited_duration_secs and worker.bad_probes <= 1:
            self.move(worker, Signal.PAROLE)  # no probe has said anything bad meanwhile

    # -- the worker's identity

    def identify(self, worker: Worker) -> None:
        """Its infos were read: is it the process that it was?"""
        epoch = worker.traits.epoch
        if epoch is not None and worker.epoch not in (None, epoch):
            self.restarted(worker, "its infos say so")
            worker.learnt = True  # just now
        worker.epoch = epoch or worker.epoch
        if worker.welcome and worker.learnt:
            worker.welcome, worker.standing = False, Standing.KNOWN

    def restarted(self, worker: Worker, cause: str) -> None:
        """It is a new process, which starts with a clean slate."""
        if worker.state is not State.STARTING:
            self.away(worker)
        worker.breaker.clear()
        worker.good_probes, worker.learnt, worker.epoch = 0, False, None
        self.move(worker, Signal.RESTARTED, cause)

    def away(self, worker: Worker) -> None:
        """It was: what it has now is judged, if anything is (`rejoin.py`)."""
        if self._gated:
            worker.standing = Standing.AWAY
        self._renewed(worker)

    # -- the gate

    async def vet(self, worker: Worker) -> None:
        """It answers, and its infos were read: if it was away, may it serve?"""
        if worker.standing is Standing.KNOWN:
            if worker.state is State.STALE:
                self.move(worker, Signal.ADMITTED)  # it was welcome, and its infos could not be read before
            return
        before = worker.standing
        standing, why_not = self._judged(worker)
        if before is Standing.AWAY and standing is not Standing.AWAY:
            # The others may have been given new weights since they were asked last.
            await self._relearn(self._others(worker))
            standing, why_not = self._judged(worker)
            if worker.standing is not before:
                return  # let in meanwhile
        worker.standing = standing
        if standing is Standing.AWAY:
            if not self.move(worker, Signal.OUTDATED, why_not) and worker.state is State.STALE:
                worker.cause = f"{Signal.OUTDATED}: {why_not}"  # as of now
        else:
            self.move(worker, Signal.ADMITTED)

    def _judged(self, worker: Worker) -> tuple[Standing, str]:
        if not worker.learnt:
            return Standing.AWAY, "its infos cannot be read"
        return judge(worker, self._others(worker), self._config.rejoin)

    def _others(self, worker: Worker) -> list[Worker]:
        return [other for other in self._staying() if other is not worker]

    def admit(self, worker: Worker) -> None:
        """Somebody who knows says that it may serve: as it is, or, if it is away, as it comes back."""
        if worker.state is State.STALE:
            worker.standing = Standing.KNOWN
            self.move(worker, Signal.ADMITTED, "by an operator")
        else:
            worker.welcome, worker.learnt = True, False
