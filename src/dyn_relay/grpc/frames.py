"""HTTP/2's frames, one at a time, so that what came before a bad one counts however the bytes were cut.

GOAWAY is read here and never reaches h2: h2 takes it for the end of the connection, while the streams that it spares
go on (RFC 9113, 6.8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from h2.exceptions import FrameTooLargeError

#: The largest payload that we let the peer send, which is HTTP/2's own initial limit.
MAX_FRAME_SIZE = 16384

_HEADER_SIZE = 9
_GOAWAY = 7
_GOAWAY_BODY = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class GoAway:
    """The peer takes no new streams. `reason`: the debug data, as text."""

    last_stream_id: int
    code: int
    reason: str


class FrameSplitter:
    """Bytes in, whole frames out; a GOAWAY comes out read."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes | GoAway]:
        """The frames that `data` completes. Raises `FrameTooLargeError` as soon as a frame says that it is too long."""
        held = self._data
        held += data
        start = 0
        try:
            while len(held) - start >= _HEADER_SIZE:
                size = int.from_bytes(held[start : start + 3], "big")
                if size > MAX_FRAME_SIZE:
                    raise FrameTooLargeError(f"a frame of {size} bytes; {MAX_FRAME_SIZE} are allowed")
                end = start + _HEADER_SIZE + size
                if len(held) < end:
                    break
                frame = bytes(memoryview(held)[start:end])
                start = end
                yield (_read_goaway(frame) or frame) if frame[3] == _GOAWAY else frame
        finally:
            del held[:start]


def _read_goaway(frame: bytes) -> GoAway | None:
    """None if it is malformed: h2 has the words for that."""
    on_connection = frame[5:9] in (b"\0\0\0\0", b"\x80\0\0\0")
    if len(frame) < _HEADER_SIZE + _GOAWAY_BODY.size or not on_connection:
        return None
    last, code = _GOAWAY_BODY.unpack_from(frame, _HEADER_SIZE)
    reason = frame[_HEADER_SIZE + _GOAWAY_BODY.size :].decode("utf-8", "replace")
    return GoAway(last & 0x7FFFFFFF, code, reason)
