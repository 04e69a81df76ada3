"""The events of a prefix cache, as SGLang 0.5.23 publishes them: msgpack, each a map; older versions sent arrays.

What is not known is left out and counted, field by field and event by event: a new kind of event must not cost what the
known ones say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Annotated

import msgspec

#: The engine's name of a block: the first 8 bytes of a digest, opaque to us.
Hash = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Tier(IntEnum):
    """Where a block lies, the nearest first."""

    GPU = 0
    CPU_PINNED = 1
    DISK = 2
    EXTERNAL = 3


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks that follow each other have come; a parent of None is the root.

    `token_ids`: `block_size` for each block, or as many pairs of neighbours (speculative decoding).
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """These blocks are no longer on this tier."""

    block_hashes: list[Hash]
    medium: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is left on any tier."""


class _StoredRow(Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedRow(Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedRow(Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


KvEvent = Stored | Removed | Cleared


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_Batch)
_map = msgspec.msgpack.Decoder(Stored | Removed | Cleared)
_row = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_TYPES = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def read_batch(payload: bytes, count: Callable[[str], object]) -> Iterator[KvEvent]:
    """The events of a batch, in order. `count` is told what is left out: "unknown" kinds, and what is "malformed"."""
    try:
        batch = _batch.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        count("malformed")
        return
    for raw in batch.events:
        data = bytes(raw)
        try:
            yield (_map if _is_map(data) else _row).decode(data)
        except (msgspec.DecodeError, RecursionError):
            count("malformed" if _kind(data) in _TYPES else "unknown")


def tier_of(medium: str | None) -> Tier | None:
    """The tier; the GPU if none is said, None if it is one that we do not know."""
    return Tier.GPU if medium is None else Tier.__members__.get(medium)


def _is_map(data: bytes) -> bool:
    return data[:1] in (b"\xde", b"\xdf") or 0x80 <= data[0] <= 0x8F


def _kind(data: bytes) -> object:
    """What an event that cannot be read says it is."""
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    if isinstance(value, dict):
        return str(value.get("type"))
    return str(value[0]) if isinstance(value, list) and value else None
