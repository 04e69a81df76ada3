"""Recorded exchanges with stock SGLang 0.5.23: `NAME.req` as sent, `NAME.wire` as it came back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dyn_relay.formats.base import Event, Headers

HERE = Path(__file__).parent / "captures"


@dataclass(frozen=True)
class Wire:
    """An answer without its framing."""

    status: int
    headers: Headers
    body: bytes

    @property
    def events(self) -> list[Event]:
        parts = self.body.split(b"\n\n")
        assert parts.pop() == b""
        return [(part + b"\n\n", part.removeprefix(b"data: ")) for part in parts]


def names(folder: str, prefix: str) -> list[str]:
    return [f"{folder}/{path.stem}" for path in sorted((HERE / folder).glob(f"{prefix}*.wire"))]


def exists(name: str) -> bool:
    return (HERE / f"{name}.wire").exists()


def body(name: str) -> bytes:
    return (HERE / f"{name}.req").read_bytes().partition(b"\r\n\r\n")[2]


def rid(name: str) -> str:
    """The rid that the engine made up, or was given; "ours" if the answer tells none."""
    found = re.search(rb'"id":"([^"]+)"', (HERE / f"{name}.wire").read_bytes())
    return found[1].decode() if found else "ours"


def wire(name: str) -> Wire:
    head, _, rest = (HERE / f"{name}.wire").read_bytes().partition(b"\r\n\r\n")
    if not head:
        return Wire(0, [], b"")  # the engine died without a word
    first, *lines = head.split(b"\r\n")
    headers = [(key.lower(), value.strip()) for key, _, value in (line.partition(b":") for line in lines)]
    if (b"transfer-encoding", b"chunked") in headers:
        rest = _dechunked(rest)
    return Wire(int(first.split()[1]), headers, rest)


def _dechunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        out, data = out + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return out
