"""What a failing example comes down to."""

from __future__ import annotations

from random import Random

from hypothesis import find, settings

SETTINGS = settings(max_examples=1000, database=None, deadline=None)


def minimal(strategy, condition=lambda value: True):
    """The smallest value of the strategy that meets the condition."""
    return find(strategy, condition, settings=SETTINGS, random=Random(0))
