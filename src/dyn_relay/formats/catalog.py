"""The built-in formats, by the name that `--format` takes."""

from __future__ import annotations

from typing import Literal

from dyn_relay.formats.base import Format
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.weights import WeightPolicy

NAMES = ("sglang",)


def make(
    name: str,
    on_abort: Literal["relay", "resume"] = "relay",
    weight_version_policy: str = "any",
    *,
    tell_recomputed_rows: bool = False,
    pd_disaggregation: bool = False,
    trust_client_bootstrap: bool = False,
) -> Format:
    """A format by name, with the options of the same names. Raises `LookupError`, `ValueError`."""
    if name == "sglang":
        return SglangFormat(
            on_abort,
            WeightPolicy(weight_version_policy),
            tells_recomputed=tell_recomputed_rows,
            paired=pd_disaggregation,
            trusts_bootstrap=trust_client_bootstrap,
        )
    raise LookupError(f"no format named {name!r}; there are: {', '.join(NAMES)}")
