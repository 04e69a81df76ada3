"""Which names are related: an abort of one would be an abort of the other (C3)."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dyn_relay.relay.live import LiveRequests

names = st.text("ab", min_size=1, max_size=5)


@given(st.lists(st.tuples(st.booleans(), names), max_size=30), names)
def test_c3_related_are_prefixes_and_extensions_of_what_is_live(history: list[tuple[bool, str]], asked: str) -> None:
    live = LiveRequests(random.Random(0))
    known = set()
    for remembered, name in history:
        if remembered:
            live.remember(name)
            known.add(name)
        else:
            live.forget(name)
            known.discard(name)
    others = known - {asked}
    assert live.related(asked) == any(asked.startswith(name) or name.startswith(asked) for name in others)


def test_c3_a_fresh_name_extends_no_live_one() -> None:
    live = LiveRequests(random.Random(0))
    for digit in "0123456789abcdef":
        live.remember(digit)
    live.forget("f")
    assert {live.fresh()[0] for _ in range(20)} == {"f"}
