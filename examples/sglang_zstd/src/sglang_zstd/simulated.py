"""A simulated worker that compresses. Needs the testkit: `pip install 'dyn-relay[testkit]'`."""

from __future__ import annotations

from dataclasses import replace

from dyn_testkit.worker import WorkerOptions
from sglang_zstd.codec import zstd

#: Not that of the codec: whether a value came from a worker or was joined shows in its bytes.
_LEVEL = 19


def compressing(options: WorkerOptions | None = None) -> WorkerOptions:
    """The same worker, which gives routed experts, compressed."""
    return replace(options or WorkerOptions(), routed_experts=True, packing=packed)


def packed(rows: bytes) -> bytes:
    """What such a worker makes of its rows before they are in Base64."""
    return zstd.compress(rows, level=_LEVEL)
