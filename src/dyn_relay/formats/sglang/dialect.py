"""How a worker streams, and how it is told from what it sends.

SGLang's default repeats everything so far in every event; `--incremental-streaming-output` sends deltas; there were
releases whose ids were deltas while the logprobs stayed cumulative. Nothing on the wire names the dialect. An attempt's
first event reads the same in all of them; the second settles the ids, since an event that repeats what was there before
is never as short as one that does not.
"""

from __future__ import annotations

import enum


class Dialect(enum.Enum):
    """Which lists are deltas."""

    CUMULATIVE = "cumulative"
    INCREMENTAL = "incremental"
    MIXED = "mixed"

    @property
    def ids_are_deltas(self) -> bool:
        """`output_ids` holds only what is new."""
        return self is not Dialect.CUMULATIVE

    @property
    def rows_are_deltas(self) -> bool:
        """The lists of `meta_info` with one row a token hold only what is new."""
        return self is Dialect.INCREMENTAL


def hinted(incremental: bool | None) -> Dialect | None:
    """What a worker with that `incremental_streaming_output` is known to speak; None if it does not say."""
    return None if incremental is None else Dialect.INCREMENTAL if incremental else Dialect.CUMULATIVE


def deltas(length: int, before: int, total: int) -> bool | None:
    """Is a list of `length` elements in an event that takes the count from `before` to `total` a delta?

    None: it could be either, so far. Raises `ValueError` if it can be neither, or if the count goes back.
    """
    if total < before:
        raise ValueError(f"completion_tokens went back from {before} to {total}")
    if before == 0 and length == total:
        return None
    if length == total:
        return False
    if length == total - before:
        return True
    raise ValueError(f"{length} elements where completion_tokens went from {before} to {total}")
