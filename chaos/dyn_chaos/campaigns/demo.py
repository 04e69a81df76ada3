"""The demonstration: one stream, its worker killed in mid-stream, the answer compared with an independent oracle's."""

from __future__ import annotations

from pathlib import Path


async def demo(logs: Path) -> bool:
    """Run it on the terminal; True if everything was as it should be."""
    raise NotImplementedError
