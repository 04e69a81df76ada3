"""A router under test, before one fleet of mock workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import trio

from dyn_relay.net import ConnectFailed, Network
from dyn_testkit.client import Response, begin
from dyn_testkit.faults import Kind
from dyn_testkit.laws import Stage
from dyn_testkit.laws.laws import MIGRATABLE_HEADER
from dyn_testkit.laws.observed import Case, Observed
from dyn_testkit.routers.trials import PROBE
from dyn_testkit.worker import Dialect

#: s between two looks at something that has no event.
_LOOK = 0.005
#: s that a worker stays silent.
_SILENCE = 0.3


class Hung(AssertionError):
    """A request has not ended in time, or the router serves no longer."""


class GaveUp(Exception):
    """Too many requests have hung: no more are sent."""


@dataclass(slots=True)
class Subject:
    """Asks the router. What has been observed once is not asked again."""

    network: Network
    host: str
    port: int
    stage: Stage
    fleet: Sequence[Dialect]
    answer_timeout: float
    recovery_timeout: float
    #: So many requests may hang.
    patience: int
    #: It sends `x-dyn-relay-migratable`, and so promises what else belongs to it.
    tells: bool = False
    #: Requests whose generation it has continued.
    continued: int = 0
    hangs: int = 0
    _known: dict[Case, Observed | Hung] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The router's."""
        return f"http://{self.host}:{self.port}"

    async def observe(self, case: Case) -> Observed:
        """Run one case; afterwards all workers and the router are as good as new. Raises `Hung`, `GaveUp`."""
        if case not in self._known:
            if self.hangs >= self.patience:
                raise GaveUp(f"{self.hangs} requests hung")
            try:
                self._known[case] = await self._observe(case)
            except Hung as exc:
                self._known[case] = exc
                self.hangs += 1
        found = self._known[case]
        if isinstance(found, Hung):
            raise found
        return found

    async def _observe(self, case: Case) -> Observed:
        seen = await self.ask(replace(case, dialects=tuple(self.fleet)))
        fired = any(attempt.fired for attempt in seen.attempts)
        self.continued += any(_longer(seen, number) for number in range(len(seen.attempts)))
        if fired:
            await self.recover(seen)
        return seen

    async def ask(self, case: Case) -> Observed:
        """Send a request and read the answer to its end. Raises `Hung`."""
        self.stage.begin(case)
        response = Response(broken="it could not be reached")
        silence = _SILENCE if any(fault and fault[1].kind is Kind.STALL for fault in case.faults) else 0.0
        with trio.move_on_after(silence + self.answer_timeout) as scope:
            async with trio.open_nursery() as nursery:
                if silence:
                    nursery.start_soon(self._end_of_silence, silence)
                try:
                    connection = await self.network.connect(self.host, self.port)
                except ConnectFailed:
                    pass
                else:
                    response.broken = ""
                    try:
                        ongoing = await begin(connection, "/generate", case.body, headers={"connection": "close"})
                        response = ongoing.response
                        await ongoing.rest()
                    finally:
                        connection.close()
                nursery.cancel_scope.cancel()
        seen = Observed(case, response, self.stage.attempts)
        if scope.cancelled_caught:
            await self._quiet()
            raise Hung(f"liveness: no end within {self.answer_timeout:g} s after the faults have stopped\n{seen}")
        await self._quiet()
        return replace(seen, attempts=self.stage.attempts)

    async def _end_of_silence(self, silence: float) -> None:
        await trio.sleep(silence)
        await self.stage.mend()

    async def _quiet(self) -> None:
        """The workers come back, and have nothing left to do (or a second is over)."""
        await self.stage.mend()
        with trio.move_on_after(1):
            while not self.stage.quiet:  # noqa: ASYNC110 - it has no event
                await trio.sleep(_LOOK)

    async def recover(self, after: Observed | None = None) -> Response:
        """Plain requests until as many in a row are answered as there are workers. Raises `Hung`."""
        good = 0
        last = Response()
        with trio.move_on_after(self.recovery_timeout):
            while True:
                last = (await self.ask(PROBE)).response
                good = good + 1 if last.status == 200 and last.complete else 0
                if good == len(self.fleet):
                    self.tells = self.tells or last.header(MIGRATABLE_HEADER) is not None
                    return last
                if not good:
                    await trio.sleep(10 * _LOOK)
        story = f"\nafter this:\n{after}" if after is not None else ""
        said = f"{last.status} {last.body[:200]!r} {last.broken}".strip()
        raise Hung(
            f"liveness: all workers are well, and for {self.recovery_timeout:g} s the router has not answered "
            f"{len(self.fleet)} plain requests in a row; it says {said}{story}"
        )


def _longer(seen: Observed, number: int) -> bool:
    """An attempt went on from delivered tokens."""
    try:
        return seen.resumed(number) > 0
    except (KeyError, TypeError):
        return False  # a request without token ids
