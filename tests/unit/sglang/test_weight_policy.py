"""Which weights may go on with an answer: the rule alone."""

from __future__ import annotations

import pytest

from dyn_relay.config import Config, ConfigError
from dyn_relay.formats.weights import WeightPolicy

ROWS = [
    ("any", ["7"], "8", True),
    ("any", [None], None, True),
    ("same", ["7"], "7", True),
    ("same", ["7"], "8", False),
    ("same", ["default"], "default", True),
    ("same", ["7"], None, False),
    ("same", [None], "7", False),
    # The engine itself has crossed to 8: to stay there adds nothing.
    ("same", ["7", "8"], "8", True),
    ("same", ["7", "8"], "7", False),
    ("max-lag=0", ["7"], "7", True),
    ("max-lag=0", ["7"], "8", False),
    ("max-lag=1", ["7"], "8", True),
    ("max-lag=1", ["7"], "6", True),
    ("max-lag=1", ["7"], "9", False),
    ("max-lag=1", ["7", "8"], "9", False),
    ("max-lag=2", ["7", "8"], "9", True),
    ("max-lag=2", ["7"], "10", False),
    ("max-lag=3", ["7"], "10", True),
    ("max-lag=9", ["7"], None, False),
    ("max-lag=9", [None], "7", False),
    # No integers: no lag, but equals have none.
    ("max-lag=9", ["default"], "default", True),
    ("max-lag=9", ["default"], "7", False),
    ("max-lag=9", ["7"], "step-8", False),
    ("max-lag=9", ["7"], "7.5", False),
    ("max-lag=9", ["7"], "8 ", False),
    ("max-lag=9", [7], "8", False),
    ("max-lag=2", ["-1"], "1", True),
    ("max-lag=2", ["-1"], "2", False),
    ("max-lag=1", ["100"], "101", True),
    ("max-lag=9", ["default", "7"], "7", False),
    # Once some of the makers are not known, nobody is known to fit.
    ("same", [None, "7"], "7", False),
    ("max-lag=9", [None, "7"], "7", False),
]


@pytest.mark.parametrize(("policy", "had", "offered", "fits"), ROWS)
def test_fits(policy: str, had: list[object], offered: object, fits: bool) -> None:
    assert WeightPolicy(policy).fits(had, offered) is fits


@pytest.mark.parametrize("policy", ["any", "same", "max-lag=0"])
def test_an_answer_without_tokens_may_begin_anywhere(policy: str) -> None:
    assert WeightPolicy(policy).fits([], None)


@pytest.mark.parametrize("text", ["", "none", "max-lag", "max-lag=", "max-lag=-1", "max-lag=1.5", "max-lag=1 ", "Same"])
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(ValueError, match="max-lag=N"):
        WeightPolicy(text)
    with pytest.raises(ConfigError, match="weight_version_policy"):
        Config(weight_version_policy=text)
