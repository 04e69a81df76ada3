"""What outlives a request by design: telling workers to drop attempts that were left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("relay")


class Chores:
    """Background work of a nursery's. A defect met in one is logged: it must not take all live requests down."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def start(self, work: Callable[[], Awaitable[object]]) -> trio.Event:
        """Begin one; what is returned is set when it is over, for who cannot go on before."""
        over = trio.Event()
        self._nursery.start_soon(self._survive, work, over)
        return over

    async def _survive(self, work: Callable[[], Awaitable[object]], over: trio.Event) -> None:
        try:
            await work()
        except Exception as exc:
            log.error("a chore failed because of a defect of the proxy", exc_info=exc)
        finally:
            over.set()
