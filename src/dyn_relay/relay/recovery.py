"""From the loss of an attempt to the next token: what the request needs for it, and how long it may take.

An engine that dies leaves thousands of streams, and each of their continuations is a prefill of all that it had. At
once they would bury the survivors under work of which nobody sees a token for minutes. So a continuation needs a
permit from its dispatch to its first token, `--retry-permits` for each ready worker, first come first served; whoever
waits for one holds no lease, and chooses its worker afterwards.
"""

from __future__ import annotations

import math

import trio

from dyn_relay.relay.context import Context
from dyn_relay.relay.failure import Action, Failure, Kind
from dyn_relay.relay.turnstile import Place


class Recovery:
    """One request's. `scope()` is cancelled when its time is over; `expired` says which time that was."""

    def __init__(self, context: Context) -> None:
        config = context.config
        self._request_timeout = config.request_timeout_secs
        self._migration_timeout = config.migration_timeout_secs
        self._context = context
        self._limit = trio.current_time() + config.request_timeout_secs if config.request_timeout_secs else math.inf
        #: When its time is over, as things stand.
        self._deadline = self._limit
        self._scope: trio.CancelScope | None = None
        #: The failure that the next token will have survived, if any.
        self._failure: Failure | None = None
        #: One of those before it was a loss.
        self._lost = False
        self._place: Place | None = None

    def begin(self, failure: Failure) -> None:
        """An attempt has failed, and another is to follow. What was not migrated needs neither permit nor deadline.

        What was moved as planned has no deadline: nothing was lost that could be too late.
        """
        if failure.kind is not Kind.MOVED:
            self.release()
        if failure.rule.action is not Action.MIGRATE:
            return
        if failure.rule.counts and not self._lost and self._migration_timeout:
            self._set(min(self._limit, trio.current_time() + self._migration_timeout))
        self._lost = self._lost or failure.rule.counts
        self._failure = failure

    def over(self, resumed_from: int) -> None:
        """The first token of an attempt is there."""
        self.release()
        if self._failure is not None:
            self._context.metrics.migrated(self._failure.kind.value, resumed_from)
            self._failure, self._lost = None, False
            self._set(self._limit)

    def _set(self, deadline: float) -> None:
        self._deadline = deadline
        if self._scope is not None:
            self._scope.deadline = deadline

    @property
    def limited(self) -> bool:
        """Its time may come to an end: `scope` has to be entered around what follows."""
        return self._deadline < math.inf

    def scope(self) -> trio.CancelScope:
        """Cancelled when its time is over. Made once."""
        self._scope = trio.CancelScope(deadline=self._deadline)
        return self._scope

    @property
    def permitted(self) -> bool:
        """May an attempt be made now? If not, `turn` has to be awaited."""
        if self._failure is None:
            return True
        if self._place is None:
            self._place = self._context.permits.join()
        return self._place.turn.is_set()

    @property
    def holds(self) -> bool:
        """It has a permit."""
        return self._place is not None and self._place.turn.is_set()

    async def turn(self) -> None:
        """Return when `permitted`."""
        assert self._place is not None
        await self._place.turn.wait()

    def take(self, permit: Place) -> None:
        """Somebody has waited for it, for this request."""
        self.release()
        self._place = permit

    def pause(self) -> None:
        """The request waits for something: if it has a permit, another can use it. A place in the queue is kept."""
        if self.holds:
            self.release()

    def release(self) -> None:
        """Give the permit back, or the place in the queue for it."""
        if self._place is not None:
            self._place.leave()
            self._place = None

    @property
    def expired(self) -> tuple[str, str]:
        """Why the scope was cancelled: a bounded label, and words."""
        if self._failure is None or trio.current_time() >= self._limit:
            return "request_timeout", f"the request did not end within {self._request_timeout:g} s"
        words = f"no token within {self._migration_timeout:g} s of the first loss; the last one was {self._failure}"
        return "migration_timeout", words
