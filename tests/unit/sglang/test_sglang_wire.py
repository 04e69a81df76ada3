"""What the format is built of: JSON that keeps its bytes, dialects told by counts, spans."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyn_relay.formats.sglang.dialect import deltas
from dyn_relay.formats.sglang.spans import Span, merge, of_marks
from dyn_relay.formats.sglang.wire import NotJson, read_fields, shield, unshield, write

leaves = st.floats() | st.text() | st.none() | st.sampled_from(["NaN", '"NaN', "\\", "-Infinity"])


@given(st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_shield(value: object) -> None:
    """Any JSON of Python's own writer comes back byte for byte, and is strict JSON in between."""
    for ascii_only in (True, False):
        data = json.dumps({"x": value}, ensure_ascii=ascii_only, separators=(",", ":")).encode("utf-8", "surrogatepass")
        assert unshield(shield(data)) == data
        msgspec.json.decode(shield(data))


def test_wire() -> None:
    assert write(read_fields(b'{ "a" : [1 , NaN] , "a" : 2.50 }')) == b'{"a":2.50}'
    assert write(read_fields(b'{"b":[ 1 , -Infinity ]}')) == b'{"b":[ 1 , -Infinity ]}'
    for broken in (b'{"a":NaNa}', b"{", b'{"a":nan}', b"[" * 50_000):
        with pytest.raises(NotJson):
            read_fields(broken)


@pytest.mark.parametrize(
    ("length", "before", "total", "answer"),
    [
        (2, 0, 2, None),
        (0, 0, 0, None),
        (3, 2, 3, False),
        (1, 2, 3, True),
        (2, 2, 2, False),
        (0, 2, 2, True),
    ],
)
def test_deltas(length: int, before: int, total: int, answer: bool | None) -> None:
    assert deltas(length, before, total) is answer


@pytest.mark.parametrize(("length", "before", "total"), [(1, 0, 2), (3, 0, 2), (2, 2, 3), (1, 2, 1), (4, 2, 3)])
def test_deltas_that_cannot_be(length: int, before: int, total: int) -> None:
    with pytest.raises(ValueError, match="completion_tokens"):
        deltas(length, before, total)


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from("ab")), max_size=8))
def test_spans_tile(steps: list[tuple[int, str]]) -> None:
    at, marks, labels = 0, [], ""
    for size, version in steps:
        marks.append((at, version))
        labels += version * size
        at += size
    spans = merge(of_marks(marks, at))
    assert "".join(str(span.version) * (span.end - span.start) for span in spans) == labels
    assert all(one.end == two.start and one.version != two.version for one, two in itertools.pairwise(spans))
    assert merge([Span("a", 0, 0)]) == [Span("a", 0, 0)]
