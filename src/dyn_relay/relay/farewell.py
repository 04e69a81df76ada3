"""Workers are told that nobody waits for an attempt any more, or that somebody wishes it to end."""

from __future__ import annotations

from collections.abc import Callable

import trio

from dyn_relay.relay.attempt import Attempt
from dyn_relay.relay.context import Context
from dyn_relay.relay.orders import tell

#: An abort is said again at this interval, in seconds, so many times, while its attempt goes on.
ABORT_INTERVAL = 1.0
ABORT_REPEATS = 5


def farewell(context: Context, attempt: Attempt | None) -> list[trio.Event]:
    """Tell its workers, which may still live, to stop. What is returned is set when that is over, for each."""
    if attempt is None or not attempt.sent or not attempt.rid or context.live.related(attempt.rid):
        return []  # a related one is not migratable, and kept its name
    order = context.format.abort(attempt.rid)
    told = [context.last_orders.tell(context, worker, order) for worker in attempt.at_work]
    context.live.drop(attempt.rid, told)
    return told


async def abort(context: Context, attempt: Attempt, goes_on: Callable[[], bool]) -> None:
    """An abort may overtake the request that it means: say it again while the attempt goes on, then end it here."""
    with trio.move_on_after(ABORT_REPEATS * ABORT_INTERVAL):  # a worker that hangs answers no order either
        while goes_on():
            for worker in attempt.at_work:
                await tell(context, worker, context.format.abort(attempt.rid))
            await trio.sleep(ABORT_INTERVAL)
    if goes_on():
        attempt.give_up()
