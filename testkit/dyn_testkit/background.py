"""What runs as long as a block does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """A nursery that is cancelled at the end of the block; what the block raises is not wrapped into a group."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except Exception as exc:
            failure = exc  # raised outside, where the nursery cannot wrap it
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
