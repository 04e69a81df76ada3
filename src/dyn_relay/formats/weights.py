"""Which weights may go on with an answer that others have begun: `--weight-version-policy`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LAG = re.compile(r"max-lag=([0-9]{1,9})")
_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class WeightPolicy:
    """`any`, `same` (as made the newest token), or `max-lag=N` (no two versions of an answer further apart than N)."""

    text: str = "any"

    def __post_init__(self) -> None:
        """Raises `ValueError`."""
        if self.text not in ("any", "same") and not _LAG.fullmatch(self.text):
            raise ValueError(f"must be any, same or max-lag=N, not {self.text!r}")

    def fits(self, had: Sequence[object], offered: object) -> bool:
        """May weights of version `offered` follow those that made the tokens so far, `had`, in their order?

        An unknown version (None) fits nowhere but under `any`. A version has a lag if it is an integer's
        digits; of others only an equal one fits.
        """
        if self.text == "any" or not had:
            return True
        if offered is None or None in had:
            return False
        if self.text == "same":
            return offered == had[-1]
        if all(one == offered for one in had):
            return True
        numbers = [number(one) for one in (*had, offered)]
        known = [one for one in numbers if one is not None]
        return len(known) == len(numbers) and max(known) - min(known) <= int(self.text.removeprefix("max-lag="))


def number(version: object) -> int | None:
    """The version as an integer, if it is the digits of one."""
    return int(version) if isinstance(version, str) and _INTEGER.fullmatch(version) else None
