"""How a sequence field of `meta_info` is spelled: from its JSON value to the bytes of its rows, and back.

Rows are int32, little-endian, `[rows, layers, chosen]`, one a position of prompt and output. Whoever joins them, after
a cut or from a prefill's answer and a decode's, does it through a codec. It is the least that a format of one's own
can change: a subclass spells values otherwise (`decode` and `encode`), the rest stays.
"""

from __future__ import annotations

import binascii
from collections.abc import Generator, Iterable, Iterator, Mapping

import msgspec
from msgspec import Raw

from dyn_relay.formats.sglang.widths import Widths

#: Bytes of an int32.
_INT = 4
#: Characters that are decoded at once: a multiple of 4.
STRIDE = 1 << 20
#: Bytes that make as many.
_BYTES = STRIDE // 4 * 3
#: Bytes of a value's rows, decoded, whatever their number.
LIMIT = 1 << 30
#: Bytes of a row, at most. Experts: 128 layers of 32 chosen; of the models that SGLang 0.5.23 knows Qwen3-235B has the
#: widest rows (94 layers of 8), and Qwen3-Next chooses most (10). Indexer: 128 layers of 4096 positions; DeepSeek-V3.2
#: has 61 of 2048.
WIDEST = {"routed_experts": 128 * 32 * _INT, "indexer_topk": 128 * 4096 * _INT}


class Codec:
    """Native: Base64 of the rows (SGLang 0.5.23, batch_result_processor.py:136). Keeps nothing between two values."""

    def __init__(self, limit: int = LIMIT, widest: Mapping[str, int] = WIDEST) -> None:
        """`limit`: no value is decoded to more bytes than that. `widest`: of a row of each field, as far as known."""
        self.limit = limit
        self.widest = widest

    def decode(self, name: str, value: Raw) -> Iterator[bytes]:
        """The bytes of the field `name`, in pieces of some MB at most: all may be 60 MB, and a lie much more.

        Raises `ValueError` if the value is not so spelled, if need be after some pieces.
        """
        text = _text(name, value)
        if len(text) % 4 or bytes(text[-3:]) == b"===":
            raise ValueError(f"{name}: not in groups of four")
        for at in range(0, len(text), STRIDE):
            piece = text[at : at + STRIDE]
            if at + STRIDE < len(text) and bytes(piece[-1:]) == b"=":
                raise ValueError(f"{name}: padding in its midst")
            try:
                data = binascii.a2b_base64(piece, strict_mode=True)
            except binascii.Error as exc:
                raise ValueError(f"{name}: {exc}") from exc
            yield data

    def encode(self, name: str, data: bytes | bytearray) -> Raw:
        """The value of the field `name` that has these rows."""
        size = -(-len(data) // 3) * 4
        text = bytearray(size + 2)  # filled, and not put together or grown: that would be more than a copy
        text[0] = text[-1] = ord('"')
        for at in range(0, len(data), _BYTES):
            piece = binascii.b2a_base64(memoryview(data)[at : at + _BYTES], newline=False)
            begin = 1 + at // 3 * 4
            text[begin : begin + len(piece)] = piece
        return Raw(text)

    def rows(self, name: str, value: Raw, count: int, width: int = 0) -> Generator[bytes, None, int]:
        """The bytes of a value that must have `count` rows of `width` bytes (0: of any), in pieces.

        Returns the width, 0 if there are no rows; one that nobody knows is whatever makes the rows come out. Raises
        `ValueError` after the last piece at the latest: nothing may be made of the pieces before.
        """
        most = min(self.limit, count * (width or self.widest.get(name, self.limit)))
        size = 0
        for piece in self.decode(name, value):
            size += len(piece)
            if size > most:
                raise ValueError(f"{name}: more than {most} bytes are not {count} rows")
            yield piece
        found, rest = divmod(size, count * _INT) if count else (0, size)
        if rest or (count and not found) or (width and size != count * width):
            raise ValueError(f"{name}: {size} bytes are not {count} rows")
        return found * _INT

    def width(self, name: str, value: Raw, count: int, width: int = 0) -> int:
        """What `rows` returns; nothing is kept of the rows. Raises `ValueError` as they do."""
        pieces = self.rows(name, value, count, width)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                found: int = end.value
                return found

    def join(
        self,
        name: str,
        prefill: Raw | None,
        decode: Raw | None,
        prompt_rows: int,
        rows: int,
        widths: Widths | None = None,
    ) -> Raw | None:
        """The value of an answer of `rows` rows that two workers made, `prompt_rows` of them the prompt's; None if not.

        The prompt's rows are the prefill's. The decode's answer has rows in their place, too, but it never went through
        these positions: they are whatever its memory held, and do not matter but for their width. Its own rows follow.
        An answer of one token has only the prompt's. A value that gives all rows is returned as it is, one that gives
        none may be anything or missing. `widths`: what is known of the model's, and learns what the two agree on.

        None if a value that gives rows is missing, is not so spelled, has another number of rows or more bytes than
        the limit, or if the two differ in their rows' width: the field is then left out. So it is if only one gives
        rows and these have another width than is known, as long as the other's do not have it, too.
        """
        known = Widths() if widths is None else widths
        try:
            if not prompt_rows:
                fits = decode is not None and known.fits(self.width(name, decode, rows))
                return decode if fits else None
            if prefill is None:
                return None
            width = self.width(name, prefill, prompt_rows)
            if rows > prompt_rows:
                return (
                    None if decode is None else self._spliced(name, prefill, decode, (prompt_rows, rows, width), known)
                )
            if width not in known.sure and not self._agrees(name, decode, rows, width, known):
                return None
            if rows == prompt_rows:
                return prefill
            data = bytearray()
            for piece in self.rows(name, prefill, prompt_rows, width):
                data += piece
            del data[rows * width :]
            return self.encode(name, data)
        except ValueError:
            return None

    def _agrees(self, name: str, decode: Raw | None, rows: int, width: int, known: Widths) -> bool:
        """May rows of this width be, of which decode's value gives none? It has as wide ones, if it has any."""
        try:
            other = 0 if decode is None else self.width(name, decode, rows)
        except ValueError:
            other = 0
        return other == width if other else known.fits(width)

    def _spliced(self, name: str, prefill: Raw, decode: Raw, shape: tuple[int, int, int], known: Widths) -> Raw:
        """Decode's value with the prefill's rows at its beginning; `shape`: how many these are, all, and their width.

        Nothing is kept of one before the other is known to have as wide rows.
        """
        prompt_rows, rows, width = shape
        data, at = bytearray(), 0
        for piece in self.rows(name, decode, rows, width):
            data += piece
        for piece in self.rows(name, prefill, prompt_rows, width):
            data[at : at + len(piece)] = piece
            at += len(piece)
        known.agree(width)
        return self.encode(name, data)


def spliced(head: bytes | bytearray, pieces: Iterable[bytes]) -> bytearray:
    """`head`, and of the pieces what comes after that many bytes."""
    data, passed = bytearray(head), 0
    for piece in pieces:
        data += piece[max(len(head) - passed, 0) :]
        passed += len(piece)
    return data


def _text(name: str, value: Raw) -> memoryview:
    """What a JSON string says, in ASCII. Some write `\\/` for `/`, as JSON allows: a copy is made of these only.

    Raises `ValueError`.
    """
    text = memoryview(value)
    if bytes(text[:1]) != b'"':
        raise ValueError(f"{name} is no string")
    if any(b"\\" in bytes(text[at : at + STRIDE]) for at in range(0, len(text), STRIDE)):
        try:
            return memoryview(msgspec.json.decode(value, type=str).encode())
        except msgspec.DecodeError as exc:
            raise ValueError(f"{name}: {exc}") from exc
    return text[1:-1]
