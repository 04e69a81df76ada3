"""The zstd join against bytes that were never compressed, and what cannot be joined."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from dyn_relay.formats.sglang.codec import LIMIT, STRIDE
from sglang_zstd import ZstdExperts
from sglang_zstd.codec import FIELD, zstd
from sglang_zstd.simulated import packed


def value(data: bytes) -> Raw:
    return Raw(json.dumps(base64.b64encode(data).decode()).encode())


def unpacked(found: Raw | None) -> bytes:
    """The bytes of a value, read by nothing of ours."""
    assert found is not None
    return zstd.decompress(base64.b64decode(json.loads(bytes(found)), validate=True))


def streamed(rows: bytes) -> bytes:
    """A frame that does not say how long it will be."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.checksum_flag: 1})
    return compressor.compress(rows) + compressor.flush()


PACKERS = st.sampled_from([packed, zstd.compress, streamed])
#: (a row's bytes, rows of the prompt, rows of the answer): also of no and of one generated token.
SHAPES = st.tuples(st.integers(1, 9).map(lambda numbers: 4 * numbers), st.integers(0, 12)).flatmap(
    lambda shape: st.tuples(st.just(shape[0]), st.just(shape[1]), st.integers(max(shape[1] - 1, 0), shape[1] + 12))
)


def exactly(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


@settings(max_examples=512, deadline=None, derandomize=True)
@given(SHAPES, PACKERS, PACKERS, st.data())
def test_a_join_is_that_of_the_bytes(
    shape: tuple[int, int, int],
    first: Callable[[bytes], bytes],
    second: Callable[[bytes], bytes],
    data: st.DataObject,
) -> None:
    """The oracle joins plain bytes, and knows nothing of frames."""
    width, prompt, rows = shape
    ours, stale = (data.draw(exactly(prompt * width)) for _ in range(2))
    own = data.draw(exactly(max(rows - prompt, 0) * width))
    decode = (stale + own)[: rows * width]
    joined = ZstdExperts().join(FIELD, value(first(ours)), value(second(decode)), prompt, rows)
    assert unpacked(joined) == (ours + own)[: rows * width]


@settings(max_examples=512, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1), PACKERS, st.data())
def test_a_spoiled_frame_is_left_out(
    prompt: int, own: int, which: int, packer: Callable[[bytes], bytes], data: st.DataObject
) -> None:
    """Cut short, with something behind it, or with rows too few; never a part of it."""
    width, rows = 8, prompt + own
    parts = [data.draw(exactly(count * width)) for count in (prompt, rows)]
    frames = [packer(part) for part in parts]
    good = frames[which]
    frames[which] = data.draw(
        st.one_of(
            st.integers(0, len(good) - 1).map(lambda size: good[:size]),
            st.binary(min_size=1, max_size=9).map(lambda more: good + more),
            st.just(packer(parts[which][:-1])),
            st.just(good + packer(b"")),
        )
    )
    assert ZstdExperts().join(FIELD, value(frames[0]), value(frames[1]), prompt, rows) is None


@pytest.mark.parametrize("spoiled", [None, Raw(b"null"), Raw(b'{"frame":1}'), Raw(b'"no frame"'), value(bytes(64))])
def test_what_is_no_frame_is_left_out(spoiled: Raw | None) -> None:
    """Rows that are not compressed, too."""
    good = value(packed(bytes(64)))
    assert ZstdExperts().join(FIELD, good, spoiled, 8, 16) is None
    assert ZstdExperts().join(FIELD, spoiled, good, 8, 16) is None
    assert ZstdExperts().join(FIELD, value(packed(bytes(32))), good, 8, 16) is not None


def test_one_token_keeps_the_prefills_value() -> None:
    """As it came: nothing is compressed again."""
    prefill = value(packed(bytes(64)))
    assert ZstdExperts().join(FIELD, prefill, None, 8, 8) is prefill


def test_other_fields_are_native() -> None:
    prefill, decode = value(b"AAAABBBB"), value(b"aaaabbbbcccc")
    joined = ZstdExperts().join("indexer_topk", prefill, decode, 2, 3)
    assert joined is not None
    assert bytes(joined) == bytes(value(b"AAAABBBBcccc"))


def test_a_bomb_costs_no_more_than_rows_may_have() -> None:
    """Some kB that expand to a GB, in either place: no more is kept than rows of the widest model."""
    bomb, good = value(zstd.compress(bytes(LIMIT + STRIDE))), value(packed(bytes(64)))
    assert len(bytes(bomb)) < STRIDE
    codec = ZstdExperts()
    tracemalloc.start()
    try:
        for rows in (7, 8, 16):
            assert codec.join(FIELD, bomb, good, 8, rows) is None
        assert codec.join(FIELD, bomb, bomb, 8, 16) is None
        assert codec.join(FIELD, value(packed(bytes(32))), bomb, 8, 16) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * STRIDE


def test_a_large_value_comes_in_pieces() -> None:
    """None of them larger than a stride, and together what was compressed."""
    rows = bytes(range(256)) * (5 * STRIDE // 256)
    pieces = list(ZstdExperts().decode(FIELD, value(packed(rows))))
    assert b"".join(pieces) == rows
    assert max(map(len, pieces)) <= STRIDE
