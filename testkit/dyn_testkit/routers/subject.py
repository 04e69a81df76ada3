"""A router under test, before one fleet of mock workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import trio

from dyn_relay.net import ConnectFailed, Network
from dyn_testkit.client import Response, begin
from dyn_testkit.faults import Kind, Spot
from dyn_testkit.laws import Stage
from dyn_testkit.laws.laws import MIGRATABLE_HEADER
from dyn_testkit.laws.observed import Case, Observed
from dyn_testkit.laws.stage import TappedConnection
from dyn_testkit.routers.trials import PROBE
from dyn_testkit.worker import Dialect

#: s between two looks at something that has no event.
_LOOK = 0.005
#: s that a worker stays silent, at least.
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
    #: Cases in which a silent worker's events did not come to the client before the silence was over.
    withheld: set[Case] = field(default_factory=set)
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
        seen = Observed(case, Response())
        silent = any(fault and fault[1].kind is Kind.STALL for fault in case.faults)
        with trio.move_on_after(self.answer_timeout) as scope:
            async with trio.open_nursery() as nursery:
                if silent:
                    scope.deadline += _SILENCE + self.answer_timeout
                    nursery.start_soon(self._silence, seen)
                await self._talk(seen)
                nursery.cancel_scope.cancel()
        await self._settle(seen)
        if scope.cancelled_caught:
            raise Hung(f"liveness: no end within {self.answer_timeout:g} s after the faults have stopped\n{seen}")
        return seen

    async def together(self, cases: Sequence[Case]) -> list[Observed]:
        """Send requests at the same time, and read what comes in time; which attempts are whose is not known."""
        self.stage.begin(cases[0])
        found = [Observed(case, Response()) for case in cases]
        with trio.move_on_after(self.answer_timeout):
            async with trio.open_nursery() as nursery:
                for seen in found:
                    nursery.start_soon(self._talk, seen)
        return found

    async def leave(self, case: Case) -> None:
        """Send a request, and go away while its worker is silent: nobody may generate for it then. Raises `Hung`."""
        self.stage.begin(case)
        seen = Observed(case, Response())
        with trio.move_on_after(self.answer_timeout):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._talk, seen)
                while not any(attempt.fired for attempt in self.stage.attempts):  # noqa: ASYNC110 - it has no event
                    await trio.sleep(_LOOK)
                nursery.cancel_scope.cancel()
        fired = any(attempt.fired for attempt in self.stage.attempts)
        quiet = await self._quiet()
        await self._settle(seen)
        if not fired:
            raise Hung(f"liveness: no worker has come to a third token within {self.answer_timeout:g} s\n{seen}")
        if not quiet:
            raise Hung(f"liveness: {self.answer_timeout:g} s after a client has left, a worker still generates\n{seen}")

    async def _talk(self, seen: Observed) -> None:
        """Send the request; read the answer, as far as it comes, into `seen.response`."""
        case = seen.case
        try:
            connection = await self.network.connect(self.host, self.port)
        except ConnectFailed:
            seen.response.broken = "it could not be reached"
            return
        try:
            cut = TappedConnection(connection, lambda: case.fragmentation)
            ongoing = await begin(cut, "/generate", case.body, headers={"connection": "close"})
            seen.response = ongoing.response
            await ongoing.rest()
        finally:
            connection.close()

    async def _silence(self, seen: Observed) -> None:
        """The workers go on after a while, and not before what was sent till then has come to a client that streams."""
        await trio.sleep(_SILENCE)
        if seen.case.streaming and _speaks_before(seen.case):
            with trio.move_on_after(self.answer_timeout) as scope:
                while b"data: " not in b"".join(seen.response.parts):  # noqa: ASYNC110 - it has no event
                    await trio.sleep(_LOOK)
            if scope.cancelled_caught:
                self.withheld.add(seen.case)
        await self.stage.mend()

    async def _settle(self, seen: Observed) -> None:
        """The workers come back, and have nothing left to do."""
        await self.stage.mend()
        await self._quiet()
        seen.attempts = self.stage.attempts

    async def _quiet(self) -> bool:
        """Wait until no worker generates; False if that does not come."""
        with trio.move_on_after(self.answer_timeout):
            while not self.stage.quiet:  # noqa: ASYNC110 - it has no event
                await trio.sleep(_LOOK)
            return True
        return False

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


def _speaks_before(case: Case) -> bool:
    """The worker has sent events when it goes silent."""
    return any(fault and fault[0].spot is not Spot.AT_HEAD for fault in case.faults)


def _longer(seen: Observed, number: int) -> bool:
    """An attempt went on from delivered tokens."""
    try:
        return seen.resumed(number) > 0
    except (KeyError, TypeError):
        return False  # a request without token ids
