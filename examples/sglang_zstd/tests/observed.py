"""The testkit's own cases, for requests that ask for experts, and its own laws, for answers whose experts are packed.

What the laws compare with knows nothing of zstd: values are unpacked before they look, and nothing else is touched.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dyn_testkit.laws import Case, Observed, Sometimes
from dyn_testkit.laws import cases as some
from dyn_testkit.oracle import Oracle
from dyn_testkit.worker import WorkerOptions
from sglang_zstd.codec import zstd
from sglang_zstd.simulated import compressing

OPTIONS = compressing(WorkerOptions(model=some.MODEL, min_new_tokens_needs_tokenizer=False))
ORACLE = Oracle(some.MODEL, routed_experts=True)

_VALUE = re.compile(rb'("routed_experts": ?")([^"]*)"')

_settings = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


def asking(body: bytes, start: int = 0) -> bytes:
    """The same request for experts, from a position on if there are so many."""
    value: dict[str, Any] = json.loads(body)
    more = {"routed_experts_start_len": min(start, len(value["input_ids"]))} if start else {}
    return json.dumps({**value, "return_routed_experts": True, **more}).encode()


def cases(plan: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Case]:
    """Requests for experts, under faults."""
    return some.cases(st.builds(asking, some.bodies(), st.integers(0, 4)), plan)


def judged() -> st.SearchStrategy[tuple[bytes, str]]:
    """Such requests with what an admission must say of them."""
    return some.judged_bodies().map(lambda pair: (asking(pair[0]), pair[1]))


def hard() -> list[Case]:
    """The testkit's hard cases, one by one."""
    return [replace(case, body=asking(case.body)) for case in some.hard()]


def unpacked(seen: Observed) -> Observed:
    """With the experts that a native worker would have given."""

    def native(match: re.Match[bytes]) -> bytes:
        return match[1] + base64.b64encode(zstd.decompress(base64.b64decode(match[2], validate=True))) + b'"'

    return replace(seen, response=replace(seen.response, body=_VALUE.sub(native, seen.response.body)))


def prove(
    check: Callable[[Any], Observed],
    strategy: st.SearchStrategy[Any],
    goals: list[str],
    begin: Iterable[Case] = (),
    examples: int = 128,
) -> None:
    """Check examples; each goal must be met by one at least, or nothing was shown."""
    met = Sometimes(goals)

    def watched(case: Any) -> None:
        met.watch(check(case))

    for one in begin:
        watched = example(one)(watched)
    settings(_settings, max_examples=examples)(given(strategy)(watched))()
    met.verify()
