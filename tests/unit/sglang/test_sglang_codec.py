"""Rows of a prefill's answer and of a decode's: joined exactly, or left out. Cases I1 to I6 never show stale rows."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Iterator

import pytest
from msgspec import Raw

from dyn_relay.formats.sglang.codec import STRIDE, Codec
from dyn_relay.formats.sglang.replay import Replay

WIDTH = 3
PROMPT, ROWS = 5, 9
JUNK = [
    Raw(b"null"),
    Raw(b"7"),
    Raw(b"[1]"),
    Raw(b'{"data":"AAAA"}'),
    Raw(b'"!!!!"'),
    Raw(b'"AAAAA"'),
    Raw(b'""'),
    Raw(b"1" + b"2" * 240 + b"3"),  # a number: without its ends, good Base64 of rows for any of these counts
    Raw(json.dumps(base64.b64encode(bytes(180)).decode() + "=").encode()),
    Raw(json.dumps(base64.b64encode(bytes(180)).decode() + "====").encode()),
    Raw(b'"' + b"\\u00e9" * 240 + b'"'),
]


def data(count: int, mark: int = 0, width: int = WIDTH) -> bytes:
    """Rows of int32, each of them its position and a mark."""
    return b"".join((at + mark).to_bytes(4, "little") * width for at in range(count))


def value(rows: bytes) -> Raw:
    return Raw(json.dumps(base64.b64encode(rows).decode()).encode())


def read(joined: Raw | None) -> bytes:
    assert joined is not None
    return base64.b64decode(json.loads(bytes(joined)), validate=True)


PREFILL, DECODE = value(data(PROMPT)), value(data(ROWS, mark=64))


def join(prefill: Raw | None, decode: Raw | None, prompt_rows: int = PROMPT, rows: int = ROWS) -> Raw | None:
    return Codec().join("routed_experts", prefill, decode, prompt_rows, rows)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 7])
def test_prompt_rows_are_the_prefills_and_the_rest_the_decodes(prompt: int, width: int) -> None:
    """Whatever remainder of a Base64 group the cut leaves."""
    joined = join(value(data(prompt, 0, width)), value(data(ROWS, 64, width)), prompt)
    assert read(joined) == data(prompt, 0, width) + data(ROWS, 64, width)[prompt * width * 4 :]


def test_the_decodes_prompt_rows_do_not_matter() -> None:
    stale = value(bytes(PROMPT * WIDTH * 4) + data(ROWS, 64)[PROMPT * WIDTH * 4 :])
    assert bytes(join(PREFILL, stale) or b"") == bytes(join(PREFILL, DECODE) or b"!")


@pytest.mark.parametrize("decode", [None, value(data(PROMPT, 64)), *JUNK])
def test_one_token_keeps_the_prefills_rows(decode: Raw | None) -> None:
    """As they came: the decode gives none."""
    assert join(PREFILL, decode, rows=PROMPT) is PREFILL


def test_what_json_escapes_is_read() -> None:
    """`\\/` is a legal way to write `/`."""
    rows = b"\xff" * (PROMPT * 4)
    escaped = Raw(bytes(value(rows)).replace(b"/", b"\\/"))
    assert b"\\/" in bytes(escaped)
    assert join(escaped, None, rows=PROMPT) is escaped
    assert read(join(escaped, value(bytes(ROWS * 4)))) == rows + bytes((ROWS - PROMPT) * 4)
    large = Raw(b'"' + b"A" * STRIDE + b"\\/" * 16 + b'"')
    assert b"".join(Codec().decode("routed_experts", large)) == bytes(STRIDE // 4 * 3) + b"\xff" * 12


@pytest.mark.parametrize("size", range(8))
def test_rows_of_any_length_are_spelled(size: int) -> None:
    assert read(Codec().encode("routed_experts", bytes(size))) == bytes(size)


def test_no_token_has_a_row_less() -> None:
    assert read(join(PREFILL, None, rows=PROMPT - 1)) == data(PROMPT - 1)


@pytest.mark.parametrize("prefill", [None, PREFILL, *JUNK])
def test_rows_that_begin_after_the_prompt_are_the_decodes(prefill: Raw | None) -> None:
    """`routed_experts_start_len` at the prompt's end."""
    assert join(prefill, DECODE, prompt_rows=0) is DECODE
    assert join(prefill, value(b""), prompt_rows=0, rows=0) is not None


#: No number of rows that another width would explain.
MISFITS = [None, *JUNK, value(data(ROWS + 2)), value(data(ROWS)[:-1]), value(data(ROWS)[:-4])]


@pytest.mark.parametrize("wrong", [*MISFITS, value(data(PROMPT + 1)), value(data(PROMPT - 1)), DECODE])
def test_without_the_prefills_rows_the_field_is_left_out(wrong: Raw | None) -> None:
    assert join(wrong, DECODE) is None
    assert join(wrong, DECODE, rows=PROMPT) is None
    assert join(wrong, DECODE, rows=PROMPT - 1) is None


@pytest.mark.parametrize("wrong", [*MISFITS, PREFILL, value(data(ROWS - 1))])
def test_without_the_decodes_rows_the_field_is_left_out(wrong: Raw | None) -> None:
    assert join(PREFILL, wrong) is None
    assert join(None, wrong, prompt_rows=0) is None


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1, 2 * WIDTH])
def test_rows_of_two_widths_are_not_joined(width: int) -> None:
    """Each answer is whole on its own: two models, or two shapes of one."""
    assert join(PREFILL, value(data(ROWS, 64, width))) is None


def test_no_more_is_decoded_than_the_limit() -> None:
    size = len(data(ROWS))
    assert Codec(size).join("routed_experts", PREFILL, DECODE, PROMPT, ROWS) is not None
    assert Codec(size - 1).join("routed_experts", PREFILL, DECODE, PROMPT, ROWS) is None
    assert Codec(len(data(PROMPT)) - 1).join("routed_experts", PREFILL, None, PROMPT, PROMPT) is None


class Bomb(Codec):
    """A value of far more than anybody wants, once it is decoded."""

    def __init__(self, limit: int, piece: int = 1000) -> None:
        super().__init__(limit)
        self.given, self._piece = 0, piece

    def decode(self, name: str, value: Raw) -> Iterator[bytes]:
        for self.given in range(1, 1000):
            yield bytes(self._piece)


@pytest.mark.parametrize(("width", "most"), [(0, 10), (100, 4), (1 << 40, 10)])
def test_a_bomb_is_not_decoded_to_its_end(width: int, most: int) -> None:
    """Where the width of a row is known the rows are the limit, else the codec's."""
    codec = Bomb(10_000)
    with pytest.raises(ValueError, match="more than"):
        list(codec.rows("routed_experts", PREFILL, 40, width))
    assert codec.given == most + 1


@pytest.mark.parametrize(("name", "widest"), [("routed_experts", 16 << 10), ("indexer_topk", 2 << 20)])
def test_a_row_is_no_wider_than_any_models(name: str, widest: int) -> None:
    """Whoever's value it is, and before anything is known of it."""
    codec, good = Bomb(1 << 30, piece=1 << 14), value(bytes(4))
    for count in (1, 2):
        with pytest.raises(ValueError, match="more than"):
            codec.width(name, PREFILL, count)
        assert codec.given == count * widest // (1 << 14) + 1
    for legs in ((PREFILL, good), (good, PREFILL), (PREFILL, PREFILL)):
        assert codec.join(name, *legs, 1, 2) is None


def test_a_large_value_comes_in_pieces() -> None:
    count = STRIDE
    pieces = list(Codec().rows("routed_experts", value(data(count, 0, 1)), count))
    assert len(pieces) > 5
    assert b"".join(pieces) == data(count, 0, 1)


#: A position has a row of this many bytes; and so many positions, of which the first have other rows.
BROAD, POSITIONS, FIRST = 4000, 4000, 1000


@pytest.mark.parametrize("how", ["two legs", "two attempts"])
def test_a_large_join_takes_less_than_three_copies(how: str) -> None:
    """G7, of values that must be put together: what is needed beyond the two, the joined one included."""
    first, second = bytes(FIRST * BROAD), b"\1" * (POSITIONS * BROAD)
    values = value(first), value(second)
    replay = Replay("routed_experts", 0, Codec())
    replay.note(values[0], FIRST)
    tracemalloc.start()
    try:
        if how == "two legs":
            joined = Codec().join("routed_experts", *values, FIRST, POSITIONS)
        else:
            replay.settle(1, 0, FIRST)
            joined = replay.shown(values[1], 1, FIRST, POSITIONS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read(joined) == first + second[len(first) :]
    size = len(bytes(values[1]))
    print(f"{peak / size:.2f} times the value")
    assert peak < 3 * size
