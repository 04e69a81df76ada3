"""The laws about tokens, asked of the toy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings

from dyn_testkit import faults
from dyn_testkit.laws import Case, Sometimes, tokens
from dyn_testkit.simnet import Fragmentation
from examples.toy_backend.adopt import LINES, WORKERS, cases, observe, whole
from examples.toy_backend.router import Router

examples = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
CUT = (faults.at_token(2), faults.RESET)
HARD = Case(b'{"prompt": [5, 6], "n": 9, "by": 1}', (CUT,) * 3, fragmentation=Fragmentation(1), wire=LINES)
#: Found by the laws in a first version of the router: an EOS token that the client sent is not an end.
OWN_EOS = Case(b'{"prompt": [2], "n": 1, "by": 1}', ((faults.AT_HEAD, faults.CLOSE),), wire=LINES)


def test_every_law_under_cuts() -> None:
    goals = Sometimes(["nothing happens", "three kills in one request", "continued twice", "one byte a read"])

    @examples
    @example(HARD)
    @example(OWN_EOS)
    @given(cases())
    def check(case: Case) -> None:
        seen = observe(case)
        goals.watch(seen)
        tokens.equivalence(seen, whole(seen))
        tokens.budget(seen, whole(seen))
        tokens.no_false_success(seen, whole(seen))
        tokens.exactly_once(seen)
        one_line = json.dumps({**seen.request, "by": seen.request["n"]}).encode()
        tokens.fold(observe(replace(case, body=one_line)), seen)

    check()
    goals.verify()


def test_nobody_is_left() -> None:
    """More cuts than workers: what came is no whole answer, to nobody."""

    @examples
    @given(cases(most_faults=2 * WORKERS))
    def check(case: Case) -> None:
        seen = observe(case)
        tokens.no_false_success(seen, whole(seen))
        tokens.exactly_once(seen)

    check()


class AsksForAllAgain(Router):
    """A planted bug: the budget of a continuation is the client's."""

    def take(self, request: dict[str, Any], tokens: list[int]) -> None:
        request["prompt"] += tokens


class EndsCleanly(Router):
    """Another: whatever is over was complete."""

    def known_end(self, request: dict[str, Any], delivered: list[int]) -> str | None:
        return "length"


@pytest.mark.parametrize(("router", "law"), [(AsksForAllAgain, tokens.budget), (EndsCleanly, tokens.no_false_success)])
def test_a_planted_bug_is_found(router: type[Router], law: Any) -> None:
    seen = observe(Case(b'{"prompt": [5, 6], "n": 6, "by": 1}', (CUT,), wire=LINES), router)
    with pytest.raises(AssertionError, match=law.__name__.replace("_", " ")):
        law(seen, whole(seen))
    with pytest.raises(AssertionError, match="equivalence"):
        tokens.equivalence(seen, whole(seen))
