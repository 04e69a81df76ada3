"""What a continuation's finish must hold: lists and spans that line up with the tokens, or it ends no answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from sglang_kit import SSE_HEAD, opened

from dyn_relay.formats.base import CannotComplete, End
from dyn_relay.formats.sglang.events import DONE
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.traits import UNKNOWN

ROWS = [[-0.5, 7, None], [-0.25, 8, None], [-0.75, 9, None], [-1.0, 9, None]]
REASON = {"type": "length", "length": 2}
SPANS = [{"version": "1", "start": 0, "end": 2}]
BLOB = "A" * 400

both = pytest.mark.parametrize("stream", [True, False])
dialects = pytest.mark.parametrize("deltas", [False, True], ids=["cumulative", "incremental"])


def event(ids: Any, total: int, **meta: Any) -> tuple[bytes, bytes]:
    value = {"output_ids": ids, "meta_info": {"id": "again", "finish_reason": None, "completion_tokens": total, **meta}}
    data = json.dumps(value, separators=(",", ":")).encode()
    return b"data: " + data + b"\n\n", data


def continued(stream: bool, deltas: bool, first: dict[str, Any]) -> SglangExchange:
    """Two tokens were delivered, with logprobs and these fields; the next attempt has given one."""
    asked = {"rid": "mine", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "stream": stream}
    exchange = opened({**asked, "return_logprob": True})
    for name, at in (("mine", 0), ("again", 2)):
        exchange.dispatch(UNKNOWN, name, 10.0)
        exchange.head(200, SSE_HEAD)
        for count in range(1, 3 if name == "mine" else 2):
            since = at + count - 1 if deltas else at
            fields = first if name == "mine" else {}
            rows = ROWS[since : at + count]
            exchange.feed([event([7] * len(rows), count, id=name, output_token_logprobs=rows, **fields)], 11.0)
    assert exchange.end is None
    assert exchange.delivered == 3
    return exchange


def finished(stream: bool, deltas: bool, first: dict[str, Any] | None = None, ids: Any = None, **last: Any) -> Any:
    """How the finish was taken: what the client has in the end, or the exchange's end."""
    exchange = continued(stream, deltas, first or {})
    meta = {"finish_reason": REASON, "weight_version": "1", "weight_versions": SPANS}
    meta["output_token_logprobs"] = ROWS[3:] if deltas else ROWS[2:]
    meta |= last
    meta = {name: value for name, value in meta.items() if value is not ...}
    given = ids if ids is not None else [9] if deltas else [7, 9]
    out = exchange.feed([event(given, 2, **meta), (b"data: [DONE]\n\n", DONE)], 12.0)
    if exchange.end is not End.FINISHED:
        # Nothing of it counts: the next worker begins where the last one was.
        assert exchange.delivered == 3
        return exchange.end
    return json.loads(out.split(b"\n\n")[0][6:]) if stream else json.loads(exchange.answer(13.0).body)


@both
@dialects
def test_what_lines_up(stream: bool, deltas: bool) -> None:
    value = finished(stream, deltas)
    whole = stream and deltas
    assert value["meta_info"]["output_token_logprobs"] == (ROWS[3:] if whole else ROWS)
    assert value["output_ids"] == ([9] if whole else [7, 7, 7, 9])


@both
@dialects
@pytest.mark.parametrize("rows", [[], ROWS[1:], ...], ids=["none", "more", "missing"])
def test_logprobs_that_do_not(stream: bool, deltas: bool, rows: Any) -> None:
    """E9: as many of them as ids, or they would be taken for those of other tokens."""
    assert finished(stream, deltas, output_token_logprobs=rows) is End.GARBAGE


@both
@dialects
@pytest.mark.parametrize(
    "spans",
    [
        "?",
        None,
        [],
        [{**SPANS[0], "end": 1}],
        [{**SPANS[0], "start": -3}],
        [{**SPANS[0], "end": 101}],
        [{**SPANS[0], "start": 2}],
    ],
)
def test_spans_that_do_not(stream: bool, deltas: bool, spans: Any) -> None:
    """H2."""
    assert finished(stream, deltas, weight_versions=spans) is End.GARBAGE


@both
@dialects
@pytest.mark.parametrize("ids", [None, "x", True, ["9"], [-1], [1 << 32], [[9]]])
def test_ids_that_are_none(stream: bool, deltas: bool, ids: Any) -> None:
    given = [*([7] if not deltas else []), *ids] if isinstance(ids, list) else ids
    exchange = continued(stream, deltas, {})
    meta = {"finish_reason": REASON, "output_token_logprobs": ROWS[3:] if deltas else ROWS[2:]}
    exchange.feed([event(given, 2, **meta)], 12.0)
    assert exchange.end is End.GARBAGE


@both
@dialects
@pytest.mark.parametrize("value", [[0.1, 0.2], [0.1, 0.2, 0.3], [], BLOB])
def test_unknown_rows_of_which_the_first_are_missing(stream: bool, deltas: bool, value: Any) -> None:
    """F5, G6: told with the finish only, by an extension of the engine: what it said is of its own tokens alone."""
    with pytest.raises(CannotComplete, match="meta_info"):
        finished(stream, deltas, own=value)
    fewer = "A" * 300 if value == BLOB else [*value, 1, 2, 3]
    with pytest.raises(CannotComplete, match="meta_info"):
        finished(stream, deltas, {"own": fewer}, own=value)


@both
@dialects
@pytest.mark.parametrize(
    ("first", "last"),
    [
        *[(["x", "y", "z"], ["x", "q", "z"]), (BLOB, BLOB.lower())],
        *itertools.product([None, 1, {"a": [1]}], [2, True, "short", {"a": [1, 2]}]),
    ],
)
def test_unknown_states(stream: bool, deltas: bool, first: Any, last: Any) -> None:
    """F5: what tells how things are has its newest value."""
    assert finished(stream, deltas, {"own": first}, own=last)["meta_info"]["own"] == last


@pytest.mark.parametrize("rows", [[], ROWS[1:3]], ids=["none", "two"])
def test_logprobs_of_an_event_before_the_finish(rows: Any) -> None:
    """A client that is told deltas has them for good."""
    exchange = continued(stream=True, deltas=True, first={})
    exchange.feed([event([9], 2, output_token_logprobs=ROWS[3:])], 12.0)
    assert exchange.end is None
    exchange.feed([event([9], 3, output_token_logprobs=rows)], 12.0)
    assert exchange.end is End.GARBAGE
