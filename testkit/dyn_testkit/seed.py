"""The seed of a run of tests: one number, `pytest --dyn-seed N` or DYN_SEED=N, told when a test fails."""

from __future__ import annotations

import os

#: Also the one way from pytest's option to whatever needs the seed, in processes of the test too.
VARIABLE = "DYN_SEED"


def run_seed() -> int:
    """DYN_SEED; 0 if unset, so that what was green stays green. Raises `ValueError`."""
    text = os.environ.get(VARIABLE) or "0"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{VARIABLE}: {text!r} is not a whole number") from None
