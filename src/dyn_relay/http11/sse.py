"""Server-sent events: cutting a byte stream at its event boundaries.

A boundary is a blank line, nothing else: no text is ever searched for, so an event may hold `data: [DONE]`, escaped
line ends or anything else in its payload. Lines end with LF or CRLF, freely mixed; a lone CR is an ordinary byte (no
engine writes one as a line end, and a reader of raw JSON takes it as white space).
"""

from __future__ import annotations

import re

from dyn_relay.http11.errors import EventTooLarge

#: The end of a block: the LF that ends its last line, then a blank line.
_BOUNDARY = re.compile(rb"\n\r?\n")
#: A block that is a blank line and nothing else. A byte order mark may stand before the first line of a stream.
_BLANK = re.compile(rb"\r?\n")
_BOM = b"\xef\xbb\xbf"
_FIRST_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?\r?\n")
#: Bytes of an event of which there is one copy, not two: it may be 128 MiB.
LARGE = 1 << 20
#: Bytes of a boundary that may already be there when the rest of it arrives.
_OVERLAP = 2


def in_one_chunk(data: bytes) -> bytes | None:
    """The payload of what is one chunk of one event of one data line, and nothing else, as engines write it; or None.

    A chunk's size in another spelling than our own is None as well.
    """
    start = data.find(b"\r\n", 0, 18) + 2
    end = len(data) - 4
    if (
        start < 3
        or data[end:] != b"\n\n\r\n"
        or data[start : start + 6] != b"data: "
        or data.find(b"\n", start) != end
        or data[end - 1] == 13
        or data[: start - 2] != b"%x" % (end + 2 - start)
    ):
        return None
    return data[start + 6 : end]


class Splitter:
    """Cuts one stream into its events. Sans-IO; linear in the bytes fed, however they are fragmented."""

    __slots__ = ("_buffer", "_first", "_max_event")

    def __init__(self, max_event: int) -> None:
        """`max_event`: the largest event that is let through, in bytes as received, its blank line included."""
        self._buffer = bytearray()
        self._first = True
        self._max_event = max_event

    @property
    def pending(self) -> int:
        """Bytes held that are not a whole event yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Take the bytes of one read; return the events that are whole now.

        Each is (its bytes as received, blank line included; the payload of its data lines, joined with LF: `b""` for
        a block of comments or other fields). The raw parts, joined, are the stream up to its last boundary; but that of
        a block of `LARGE` bytes or more which is `data: `, its payload and LF LF may be left out, `b""`.
        Raises `EventTooLarge`, whether or not the event is whole yet; the splitter cannot be used after that.
        """
        # By far the most common read: one event of one data line, whole.
        if (
            not self._buffer
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
            and data[-3] != 13
            and len(data) <= self._max_event
        ):
            self._first = False
            return [(data, data[6:-2])]
        if b"\r" in data:
            return self._split(data)
        return self._rest(data) if self._buffer else self._single_lines(data, [], 0)

    def _rest(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The rest of an event that has begun with a part of its data line, as most reads' last one has; and others."""
        buffer, line_end = self._buffer, data.find(b"\n")
        usual = data.startswith(b"\n", line_end + 1) and buffer.startswith(b"data: ")
        if line_end < 0 or not usual or b"\n" in buffer or b"\r" in buffer:
            return self._split(data)
        end = line_end + 2
        size = len(buffer) + end
        if size > self._max_event:
            raise self._too_large()
        with memoryview(buffer) as begun, memoryview(data) as view:
            whole = b"".join((begun, view[:end])) if size < LARGE else b""
            payload = whole[6:-2] if whole else b"".join((begun[6:], view[:line_end]))
        buffer.clear()
        self._first = False
        return self._single_lines(data, [(whole, payload)], end)

    def _single_lines(self, data: bytes, events: list[tuple[bytes, bytes]], start: int) -> list[tuple[bytes, bytes]]:
        """Events of one data line each, as all engines write them; `_split` takes over at the first other block."""
        size = len(data)
        while start < size:
            end = data.find(b"\n", start) + 2
            simple = data[start : start + 6] == b"data: " and data[end - 2 : end] == b"\n\n"
            if not simple or end - start > self._max_event:
                return events + self._split(data[start:])
            events.append((data[start:end] if end - start < LARGE else b"", data[start + 6 : end - 2]))
            self._first = False
            start = end
        return events

    def _split(self, data: bytes) -> list[tuple[bytes, bytes]]:
        buffer = self._buffer
        source: bytes | bytearray = data
        scan = 0
        if buffer:
            scan = max(0, len(buffer) - _OVERLAP)
            buffer += data
            source = buffer
        plain = source.find(b"\r", scan) < 0
        events = []
        start = 0
        with memoryview(source) as view:
            while (end := self._block_end(source, start, max(start, scan), plain)) >= 0:
                if end - start > self._max_event:
                    raise self._too_large()
                if end - start >= LARGE and _is_usual(source, start, end):
                    events.append((b"", view[start + 6 : end - 2].tobytes()))
                else:
                    raw = view[start:end].tobytes()
                    events.append((raw, _payload(raw[3:] if self._first and raw.startswith(_BOM) else raw)))
                self._first = False
                start = end
        if source is data:
            buffer += data[start:] if start else data
        elif start:
            del buffer[:start]
        if len(buffer) > self._max_event:
            raise self._too_large()
        return events

    def _block_end(self, source: bytes | bytearray, start: int, scan: int, plain: bool) -> int:
        """Where the block that begins at `start` ends; -1 if not yet.

        No boundary begins before `scan`; if `plain`, no CR stands there or after it.
        """
        if start < len(source) and (self._first or source[start] in b"\r\n"):
            blank = (_FIRST_BLANK if self._first else _BLANK).match(source, start)
            if blank:
                return blank.end()
        if plain:
            # Line end by line end: `find` looks for one byte at the speed of memory, for two it is fifty times slower.
            while (scan := source.find(b"\n", scan) + 1) > 0:
                if source.startswith(b"\n", scan):
                    return scan + 1
            return -1
        found = _BOUNDARY.search(source, scan)
        return found.end() if found else -1

    def _too_large(self) -> EventTooLarge:
        return EventTooLarge(f"a server-sent event is larger than {self._max_event} bytes")


def _is_usual(source: bytes | bytearray, start: int, end: int) -> bool:
    """Is a block `data: `, one line, LF LF?"""
    framed = source.startswith(b"data: ", start) and source.find(b"\n", start) == end - 2
    return framed and source.find(b"\r", start, end) < 0


def _payload(raw: bytes) -> bytes:
    """The data of one block."""
    if raw.startswith(b"data:") and raw.find(b"\n") >= len(raw) - 3:
        # One line and the blank one: a single copy of what may be 128 MiB.
        end = raw.index(b"\n")
        return raw[6 if raw.startswith(b"data: ") else 5 : end - 1 if raw[end - 1] == 13 else end]
    lines = (line[:-1] if line.endswith(b"\r") else line for line in raw.split(b"\n"))
    return b"\n".join([_value(line) for line in lines if line.startswith(b"data:") or line == b"data"])


def _value(line: bytes) -> bytes:
    """What a data line carries: all after the colon and one blank."""
    return line[6:] if line.startswith(b"data: ") else line[5:]


def comment(text: bytes) -> bytes:
    """A comment of one line as a block of its own, for keeping a silent stream alive."""
    return b": %b\n\n" % text
