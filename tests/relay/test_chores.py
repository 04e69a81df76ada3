"""What outlives requests must not end them."""

from __future__ import annotations

import trio

from dyn_relay.relay.chores import Chores


async def test_a_defect_in_a_chore_ends_nothing_else() -> None:
    done: list[str] = []

    async def broken() -> None:
        raise OSError("out of descriptors")

    async def fine() -> None:
        await trio.lowlevel.checkpoint()
        done.append("fine")

    async with trio.open_nursery() as nursery:
        chores = Chores(nursery)
        chores.start(broken)
        chores.start(fine)
    assert done == ["fine"]
