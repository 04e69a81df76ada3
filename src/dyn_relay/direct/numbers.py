"""Numbers that gRPC carries without loss, or with none that an engine can see."""

from __future__ import annotations

import math
import struct

#: Below this temperature stock samples greedily (SGLang 0.5.23, `SamplingParams`).
_GREEDY = 1e-6


class CannotCarry(ValueError):
    """gRPC has no way to say it. `field` is the name that HTTP has for it."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


def integer(name: str, value: object) -> int:
    """A JSON integer: no boolean, no 1.0."""
    if type(value) is not int:
        raise CannotCarry(name, "must be an integer; gRPC carries one request, no batch")
    return value


def _within(name: str, value: object, low: int, high: int) -> int:
    number = integer(name, value)
    if not low <= number <= high:
        raise CannotCarry(name, f"{number} is outside of what gRPC carries, {low} to {high}")
    return number


def int32(name: str, value: object) -> int:
    """An integer of 32 bits."""
    return _within(name, value, -(2**31), 2**31 - 1)


def uint32(name: str, value: object) -> int:
    """The same without a sign."""
    return _within(name, value, 0, 2**32 - 1)


def int64(name: str, value: object) -> int:
    """An integer of 64 bits."""
    return _within(name, value, -(2**63), 2**63 - 1)


def float32(name: str, value: object) -> float:
    """A number, rounded to 32 bits, as stock's own tensors of sampling parameters round it (`sampling_batch_info.py`).

    What is decided on the number before that must not change: one that would become infinite, zero, or another whole
    number (limits are whole numbers), or would cross the limit of greedy sampling, is refused.
    """
    if type(value) not in (int, float):
        raise CannotCarry(name, "must be a number")
    try:
        number = float(value)  # type: ignore[arg-type]  # it is one of the two
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        raise CannotCarry(name, f"{value} is outside of what gRPC carries, which is a float of 32 bits") from None
    if math.isfinite(number) and number != rounded and (rounded.is_integer() or _cold(number) != _cold(rounded)):
        raise CannotCarry(name, f"{value} would be rounded to {rounded:g} by gRPC, which carries floats of 32 bits")
    return rounded


def _cold(temperature: float) -> bool:
    return temperature < _GREEDY
