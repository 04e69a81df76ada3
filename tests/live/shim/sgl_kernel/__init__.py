"""Stand-in for the compiled sgl_kernel on a machine without it (CPU, no AMX build).

The stock CPU engine imports names from here at module level but, without `torch.ops.sgl_kernel.convert_weight_packed`,
takes its pure-torch paths and does not call them for plain decoding. Names asked for come back as functions that fail
loudly when called. The one op that seeded sampling (`--enable-deterministic-inference`) does call is pure torch here.
"""

import os

import torch

MASK = 0xFFFFFFFF
_lib = torch.library.Library("sgl_kernel", "FRAGMENT")
_lib.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")


def _rotate(x, r):
    return ((x << r) | (x >> (32 - r))) & MASK


def _mix(h, k):
    k = (k * 0xCC9E2D51) & MASK
    k = (_rotate(k, 15) * 0x1B873593) & MASK
    return (_rotate(h ^ k, 13) * 5 + 0xE6546B64) & MASK


def _murmur_hash32_cpu(seed, positions, col_indices):
    """MurmurHash3 of (seed, position, column), [n] x [m] -> [n, m], as sglang's Triton kernel mixes them.

    In int64: products wrap modulo 2^64, so their low 32 bits are exact.
    """
    s = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    n, m = s.shape[0], col_indices.shape[0]
    h = torch.zeros((n, 1), dtype=torch.int64)
    h = _mix(h, (s & MASK).view(n, 1))
    h = _mix(h, ((s >> 32) & MASK).view(n, 1))
    h = _mix(h, (positions.to(torch.int64) & MASK).view(n, 1))
    h = _mix(h, (col_indices.to(torch.int64) & MASK).view(1, m))
    h = h ^ 16
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & MASK
    return (h ^ (h >> 16)).to(torch.uint32)


_lib.impl("murmur_hash32_cpu", _murmur_hash32_cpu, "CPU")

if os.environ.get("SHIM_SKIP_BATCH_INVARIANT") == "1":
    # The deterministic flag swaps in Triton GEMMs, which raise on a CPU. Marked as installed, they are left out, and
    # seeded sampling stays stock.
    import sglang.srt.batch_invariant_ops.batch_invariant_ops as _invariant

    _invariant._batch_invariant_MODE = True


class _NoCudart:
    """`--enable-return-routed-experts` pins its host buffer; on a CPU there is nothing to pin."""

    @staticmethod
    def cudaHostRegister(ptr, size, flags):
        return 0

    @staticmethod
    def cudaHostUnregister(ptr):
        return 0

    @staticmethod
    def cudaGetErrorString(rc):
        return "no error"


if torch.version.cuda is None:
    torch.cuda.cudart = lambda: _NoCudart

if os.environ.get("SHIM_IGNORE_PIN_MEMORY") == "1":
    # Prefill/decode pairs ask for pinned memory and for events of an accelerator outright. Without one, plain memory
    # does, and everything has already happened.
    _empty = torch.empty

    def _unpinned(*args, pin_memory=False, **kwargs):
        return _empty(*args, **kwargs)

    class _Event:
        def __init__(self, *args, **kwargs):
            pass

        def record(self, *args):
            pass

        def wait(self, *args):
            pass

        def synchronize(self):
            pass

        def query(self):
            return True

    torch.empty = _unpinned
    torch.cuda.Event = _Event
    torch.cuda.current_stream = lambda *args, **kwargs: None


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel shim: {name} called")

    missing.__name__ = name
    return missing
