"""KV events on the wire: maps and arrays, what is unknown, and what a stock engine has sent."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from kv_kit import batch

from dyn_relay.fleet.kv.events import Cleared, KvEvent, Removed, Stored, Tier, read_batch, tier_of
from dyn_testkit.worker.kv_cache import KvCache

STORED = {
    "type": "BlockStored",
    "block_hashes": [-5, 7],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 1,
}
#: A batch that SGLang 0.5.23 has sent, on the CPU; the tokens are 4 to 67, in pages of 16.
CAPTURED = bytes.fromhex(
    "93cb41dac312f3b4c19d9187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657394cf5ada112f312b5b0bd3d873e2e2"
    "ff3f76bfcf18c6c5d2b9522cb1d3cb62995005798bdab1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0040040506"
    "0708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
    "40414243aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da347505500"
)


def read(payload: bytes) -> tuple[list[KvEvent], Counter[str]]:
    counts: Counter[str] = Counter()
    return list(read_batch(payload, lambda what: counts.update([what]))), counts


def test_what_a_stock_engine_sends() -> None:
    """And the mock worker names its pages as the engine does."""
    events, counts = read(CAPTURED)
    told: list[dict[str, object]] = []
    KvCache(16, 100, told.extend, coalesce=True).insert(range(4, 68 + 7))
    assert events == [Stored([6546563902722497291, -2849684674622556481, 1785331811141954737, -3791299367324251174],
                             None, list(range(4, 68)), 16, medium="GPU")]  # fmt: skip
    assert told == msgspec.msgpack.decode(CAPTURED)[1]
    assert not counts


def test_maps_and_arrays_say_the_same() -> None:
    maps = [STORED | {"medium": "DISK"}, {"type": "BlockRemoved", "block_hashes": [3]}, {"type": "AllBlocksCleared"}]
    rows = [["BlockStored", [-5, 7], None, [1, 2], 1, None, "DISK"], ["BlockRemoved", [3]], ["AllBlocksCleared"]]
    for events in (maps, rows):
        (stored, removed, cleared), counts = read(batch(*events))
        assert isinstance(stored, Stored)
        assert (stored.block_hashes, stored.token_ids, stored.medium) == ([-5, 7], [1, 2], "DISK")
        assert isinstance(removed, Removed)
        assert (removed.block_hashes, removed.medium) == ([3], None)
        assert isinstance(cleared, Cleared)
        assert not counts


def test_unknown_events_and_fields_cost_nothing_but_themselves() -> None:
    payload = batch(
        {"type": "BlockMoved", "to": "moon"}, ["BlockMoved"], STORED | {"colour": "red"}, 7, [], {"block_hashes": [1]}
    )
    events, counts = read(payload)
    assert [type(event) for event in events] == [Stored]
    assert counts == {"unknown": 5}


def test_known_events_that_make_no_sense() -> None:
    events, counts = read(
        batch(STORED | {"block_hashes": "x"}, STORED | {"block_hashes": [2**63]}, ["BlockRemoved"], STORED)
    )
    assert [type(event) for event in events] == [Stored]
    assert counts == {"malformed": 3}


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({"a": 1}), CAPTURED[:-60]])
def test_what_is_no_batch(payload: bytes) -> None:
    assert read(payload) == ([], Counter({"malformed": 1}))


def test_a_batch_may_say_more_than_we_know() -> None:
    assert len(read(msgspec.msgpack.encode([1, [STORED], 0, "more"]))[0]) == 1
    assert len(read(msgspec.msgpack.encode([1.5, [STORED]]))[0]) == 1


def test_tiers() -> None:
    assert [tier_of(name) for name in (None, "GPU", "CPU_PINNED", "DISK", "EXTERNAL", "TAPE")] == [
        Tier.GPU, Tier.GPU, Tier.CPU_PINNED, Tier.DISK, Tier.EXTERNAL, None,
    ]  # fmt: skip
