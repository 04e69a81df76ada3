"""`--decode-fallback`: whether workers that were named for decode do all of the work, since there are no pairs."""

from __future__ import annotations

import structlog

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("relay")

#: On an answer of such a worker.
AGGREGATED_HEADER = b"x-dyn-relay-aggregated"


class Fallback:
    """How it is now. It is said once each time that it changes."""

    def __init__(self) -> None:
        self.on = False

    def note(self, *, on: bool) -> None:
        """An attempt goes to a worker that does all, or a prefill worker has answered."""
        if on and not self.on:
            log.warning("no pair can be made: workers that were named for decode serve whole requests")
        elif self.on and not on:
            log.info("a prefill worker has answered: requests go to pairs again")
        self.on = on
