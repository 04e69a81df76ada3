"""How a sequence field of `meta_info` is spelled: from its JSON value to the bytes of its rows, and back.

Rows are int32, little-endian, `[rows, layers, chosen]`, one a position of prompt and output. Whoever joins them, after
a cut or from a prefill's answer and a decode's, does it through a codec. It is the least that a format of one's own
can change: a subclass spells values otherwise (`decode` and `encode`), the rest stays.
"""

from __future__ import annotations

import binascii
from collections.abc import Generator, Iterable, Iterator

from msgspec import Raw

#: Bytes of an int32.
_INT = 4
#: Characters that are decoded at once: a multiple of 4.
STRIDE = 1 << 20
#: Bytes that make as many.
_BYTES = STRIDE // 4 * 3
#: Bytes of a value's rows, decoded: half a million positions of the widest model there is have less.
LIMIT = 1 << 30


class Codec:
    """Native: Base64 of the rows (SGLang 0.5.23, batch_result_processor.py:136). Keeps nothing between two values."""

    def __init__(self, limit: int = LIMIT) -> None:
        """`limit`: no value is decoded to more bytes than that."""
        self.limit = limit

    def decode(self, name: str, value: Raw) -> Iterator[bytes]:
        """The bytes of the field `name`, in pieces of some MB at most: all may be 60 MB, and a lie much more.

        Raises `ValueError` if the value is not so spelled, if need be after some pieces.
        """
        text = memoryview(value)
        if bytes(text[:1]) != b'"':
            raise ValueError(f"{name} is no string")
        text = text[1:-1]
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
        text = bytearray(b'"')  # grown, and not put together: that would be a copy more
        for at in range(0, len(data), _BYTES):
            text += binascii.b2a_base64(data[at : at + _BYTES], newline=False)
        text += b'"'
        return Raw(text)

    def rows(self, name: str, value: Raw, count: int, width: int = 0) -> Generator[bytes, None, int]:
        """The bytes of a value that must have `count` rows of `width` bytes (0: of any), in pieces.

        Returns the width, 0 if there are no rows; one that nobody knows is whatever makes the rows come out. Raises
        `ValueError` after the last piece at the latest: nothing may be made of the pieces before.
        """
        most = min(self.limit, count * width) if width or not count else self.limit
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

    def join(self, name: str, prefill: Raw | None, decode: Raw | None, prompt_rows: int, rows: int) -> Raw | None:
        """The value of an answer of `rows` rows that two workers made, `prompt_rows` of them the prompt's; None if not.

        The prompt's rows are the prefill's. The decode's answer has rows in their place, too, but it never went through
        these positions: they are whatever its memory held, and not looked at. Its own rows follow. An answer of one
        token has only the prompt's. A value that gives all rows is returned as it is, one that gives none may be
        anything or missing.

        None if a value that gives rows is missing, is not so spelled, has another number of rows or more bytes than
        the limit, or if the two differ in their rows' width: the field is then left out.
        """
        try:
            if not prompt_rows:
                return None if decode is None else self._checked(name, decode, rows)
            if prefill is None:
                return None
            if rows == prompt_rows:
                return self._checked(name, prefill, rows)
            head = b"".join(self.rows(name, prefill, prompt_rows))
            width = len(head) // prompt_rows
            if rows < prompt_rows:
                return self.encode(name, head[: rows * width])
            if decode is None:
                return None
            return self.encode(name, spliced(head, self.rows(name, decode, rows, width)))
        except ValueError:
            return None

    def _checked(self, name: str, value: Raw, count: int) -> Raw:
        for _ in self.rows(name, value, count):
            pass
        return value


def spliced(head: bytes, pieces: Iterable[bytes]) -> bytearray:
    """`head`, and of the pieces what comes after that many bytes."""
    data, passed = bytearray(head), 0
    for piece in pieces:
        data += piece[max(len(head) - passed, 0) :]
        passed += len(piece)
    return data
