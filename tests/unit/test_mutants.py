"""The bugs of `make mutants` can still be planted: the code has not changed under them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutants.mutants import MUTANTS, SIDECARS, Mutant

SOURCE = Path(__file__).parents[2] / "src" / "dyn_relay"


@pytest.mark.parametrize("mutant", MUTANTS + SIDECARS, ids=lambda mutant: mutant.name)
def test_it_can_be_planted(mutant: Mutant) -> None:
    assert (SOURCE / mutant.file).read_text().count(mutant.before) == 1
    assert mutant.before != mutant.after
