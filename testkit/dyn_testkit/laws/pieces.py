"""Bytes in pieces, as a network would cut them."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.simnet import Fragmentation


def pieces(data: bytes, how: Fragmentation) -> Iterator[bytes]:
    """The listed sizes first, then pieces of the largest size."""
    at, sizes = 0, iter(how.sizes)
    while at < len(data):
        size = next(sizes, how.largest or len(data))
        yield data[at : at + size]
        at += size
