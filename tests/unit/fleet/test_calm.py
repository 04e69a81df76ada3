"""When answers may go on after aborts that nobody has explained."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from dyn_relay.fleet.calm import Calm


async def test_an_abort_while_the_workers_are_asked_is_waited_out_as_well(autojump_clock: MockClock) -> None:
    """H5: they are asked 5 s after the first one, and say "not paused" 3 s later; a second one comes in between."""

    async def unpaused() -> bool:
        await trio.sleep(3)
        return True

    calm = Calm(5, trio.current_time, unpaused)
    calm.disturb()

    async def again() -> None:
        await trio.sleep(7)
        calm.disturb()

    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(again)
        await calm.wait()
    assert trio.current_time() - begun == 7 + 5 + 3
    assert not calm.disturbed
