"""A failing property tells how to run it again."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _seeded(dyn_seed):
    """All properties draw from the seed of the run."""
