"""The one thing that is different: how the rows of `routed_experts` are spelled."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from msgspec import Raw

from dyn_relay.formats.sglang.codec import STRIDE, Codec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["FIELD", "ZstdExperts", "zstd"]

FIELD = "routed_experts"

#: A frame that wants a larger window (2 to the power of this, in bytes) is not read: that is memory, too.
_WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 27}


class ZstdExperts(Codec):
    """Base64 of one zstd frame of the native bytes."""

    def decode(self, name: str, value: Raw) -> Iterator[bytes]:
        """As `Codec.decode`. However far a frame expands, no piece is larger than `STRIDE`."""
        native = super().decode(name, value)
        return _unpacked(native) if name == FIELD else native

    def encode(self, name: str, data: bytes | bytearray) -> Raw:
        """As `Codec.encode`."""
        return super().encode(name, zstd.compress(data) if name == FIELD else data)


def _unpacked(packed: Iterable[bytes]) -> Iterator[bytes]:
    """What a frame holds, in pieces. Raises `ValueError` unless there is exactly one frame, and it is whole."""
    frame = zstd.ZstdDecompressor(options=_WINDOW)
    try:
        for piece in packed:
            yield frame.decompress(piece, STRIDE)
            while not (frame.needs_input or frame.eof):
                yield frame.decompress(b"", STRIDE)
    except (zstd.ZstdError, EOFError) as exc:
        raise ValueError(f"{FIELD}: {exc}") from exc
    if not frame.eof or frame.unused_data:
        raise ValueError(f"{FIELD}: not one whole frame")
