"""Messages on the wire: five bytes, a flag and a length, before each. Plain code, no I/O."""

from __future__ import annotations

import struct

from dyn_relay.grpc.status import Lost, TooLarge

#: What SGLang's server takes and sends at most (its own limit since 0.5.21; gRPC's usual one is 4 MiB).
MAX_MESSAGE = 64 * 1024 * 1024

_PREFIX = struct.Struct(">BI")


def framed(message: bytes, limit: int = MAX_MESSAGE) -> bytes:
    """A message as it is sent. Raises `TooLarge` if it has more than `limit` bytes."""
    if len(message) > limit:
        raise TooLarge(f"the request has {len(message)} bytes; gRPC carries at most {limit}")
    return _PREFIX.pack(0, len(message)) + message


class Inbox:
    """What one stream has received: bytes in, however they are cut; messages out, when they are taken."""

    __slots__ = ("_data", "_limit")

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._data = bytearray()
        self._limit = limit

    def __len__(self) -> int:
        """Bytes held."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        self._data += data

    @property
    def ready(self) -> bool:
        """`take` has something to give, or to complain of."""
        if len(self._data) < _PREFIX.size:
            return False
        flag: int
        size: int
        flag, size = _PREFIX.unpack_from(self._data)
        return flag != 0 or size > self._limit or len(self._data) >= _PREFIX.size + size

    @property
    def missing(self) -> int:
        """Bytes without which the message that has begun is not complete; 0 before its length is known."""
        if len(self._data) < _PREFIX.size:
            return 0
        size: int = _PREFIX.unpack_from(self._data)[1]
        return max(0, _PREFIX.size + size - len(self._data))

    def take(self) -> bytes | None:
        """The next message; None while it is not complete.

        Raises `Lost` for a flag that makes no sense here, and for a message over the limit, before any of it is waited
        for: that is no status, for the server has not said that it has done nothing.
        """
        if len(self._data) < _PREFIX.size:
            return None
        flag, size = _PREFIX.unpack_from(self._data)
        if flag == 1:
            raise Lost("a compressed message, though no compression was agreed on")
        if flag:
            raise Lost(f"a message with the flag {flag}, which means nothing")
        if size > self._limit:
            raise Lost(f"a message of {size} bytes; at most {self._limit} are taken")
        end = _PREFIX.size + size
        if len(self._data) < end:
            return None
        message = bytes(memoryview(self._data)[_PREFIX.size : end])
        del self._data[:end]
        return message
