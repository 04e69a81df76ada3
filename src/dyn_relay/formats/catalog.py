"""The built-in formats, by the name that `--format` takes."""

from __future__ import annotations

from typing import Literal

from dyn_relay.formats.base import Format
from dyn_relay.formats.sglang.format import SglangFormat

NAMES = ("sglang",)


def make(name: str, on_abort: Literal["relay", "resume"] = "relay") -> Format:
    """A format by name. Raises `LookupError`."""
    if name == "sglang":
        return SglangFormat(on_abort)
    raise LookupError(f"no format named {name!r}; there are: {', '.join(NAMES)}")
