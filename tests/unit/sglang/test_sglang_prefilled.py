"""What the prefill worker's answer adds to the decode worker's, event by event."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from dyn_relay.formats.base import NativeRequest
from dyn_relay.formats.sglang.codec import Codec
from dyn_relay.formats.sglang.prefilled import Prefilled
from dyn_relay.formats.sglang.replay import replays_of
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.wire import Foreign, NotJson

DONE = (b"data: [DONE]\n\n", b"[DONE]")
COMMENT = (b": nothing yet\n\n", b"")
LOGPROBS: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
ROWS: dict[str, Any] = {"return_routed_experts": True}
FINISH = {"type": "length", "length": 1}
ABORT = {"type": "abort", "message": "x", "status_code": 500, "err_type": None}


def made(prompts: object = (1, 2, 3), *, begun: bool = False, rid: str = "a", **fields: Any) -> Prefilled:
    body = {"input_ids": list(prompts), "rid": rid, "stream": True, **fields}
    request = Request(NativeRequest("POST", "/generate", [], json.dumps(body).encode()))
    replays = {replay.name: replay for replay in replays_of(request, Codec())}
    return Prefilled(request, rid, replays, Codec(), begun=begun)


def answer(index: int | None = None, reason: object = None, **meta: Any) -> bytes:
    """An answer of three tokens of prompt and one of its own."""
    value: dict[str, Any] = {"output_ids": [7]} | ({} if index is None else {"index": index})
    value["meta_info"] = {"id": "a", "finish_reason": reason, "prompt_tokens": 3, "completion_tokens": 1, **meta}
    return json.dumps(value).encode()


def event(*args: Any, **meta: Any) -> tuple[bytes, bytes]:
    data = answer(*args, **meta)
    return b"data: " + data + b"\n\n", data


def metas(events: Any) -> list[Any]:
    return [json.loads(data)["meta_info"] for _, data in events if data not in (b"", b"[DONE]")]


def rows(*marks: int) -> str:
    """One int32 a row."""
    return base64.b64encode(b"".join(mark.to_bytes(4, "little") for mark in marks)).decode()


INPUTS = [[None, 1, None], [-1.5, 2, None], [-2.5, 3, None]]


def test_nothing_is_held_that_lacks_nothing():
    prefilled = made()
    events = [COMMENT, event(), event(reason=FINISH), DONE]
    assert prefilled.take(events) == events
    assert not prefilled.waits


@pytest.mark.parametrize("fields", [LOGPROBS, ROWS, {"return_logprob": True, "token_ids_logprob": [3]}], ids=str)
def test_what_lacks_something_is_held_until_it_is_there(fields):
    prefilled = made(**fields)
    assert list(prefilled.take([COMMENT])) == [COMMENT]
    assert not prefilled.waits
    assert list(prefilled.take([COMMENT, event(input_token_logprobs=[]), DONE])) == [COMMENT]
    assert prefilled.waits
    found, events = prefilled.told([answer(reason=FINISH, input_token_logprobs=INPUTS)])
    assert found is None
    assert not prefilled.waits
    assert [data for _, data in events][1:] == [b"[DONE]"]


@pytest.mark.parametrize("wrong", ["error", "abort", "echo"])
def test_an_error_of_decodes_waits_for_nobody(wrong):
    """But for what it says of the prompt, which is stale."""
    said = {
        "error": (b"", b'{"error":{"message":"x","code":500}}'),
        "abort": event(reason=ABORT, routed_experts=rows(9, 9, 9)),
        "echo": (b"", b'{"output_ids":[],"meta_info":{"id":"a","finish_reason":{"type":"abort"}}}'),
    }[wrong]
    prefilled = made(**LOGPROBS, **ROWS)
    passed = prefilled.take([said, DONE])
    assert len(passed) == 2
    assert b"routed_experts" not in passed[0][1]
    assert not prefilled.waits


def test_an_error_after_tokens_that_are_held_waits_with_them():
    prefilled = made(**LOGPROBS)
    assert prefilled.take([event(input_token_logprobs=[])]) == []
    assert prefilled.take([event(reason=ABORT), DONE]) == []
    _, events = prefilled.told([answer(reason=FINISH, input_token_logprobs=INPUTS)])
    assert [meta["finish_reason"] for meta in metas(events)] == [None, ABORT]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_a_batch_only_the_answer_that_failed_passes(order):
    """Its neighbour's rows of the prompt are stale until prefill's are there."""
    stale = {"input_token_logprobs": [], "routed_experts": rows(9, 9, 9)}
    said = {0: event(0, FINISH, **stale), 1: event(1, ABORT, **stale)}
    prefilled = made([[1, 2, 3], [4, 5, 6]], **LOGPROBS, **ROWS)
    passed = prefilled.take([said[number] for number in order])
    assert [json.loads(data)["index"] for _, data in passed] == [1]
    assert "routed_experts" not in metas(passed)[0]
    told = [answer(number, FINISH, input_token_logprobs=INPUTS, routed_experts=rows(1, 2, 3)) for number in (0, 1)]
    _, events = prefilled.told(told)
    [meta] = metas(events)
    assert (meta["input_token_logprobs"], meta["routed_experts"]) == (INPUTS, rows(1, 2, 3))


def test_an_answer_to_fewer_prompts_is_none():
    prefilled = made([[1, 2, 3], [4, 5, 6]], **ROWS)
    with pytest.raises(Foreign, match="1 of 2 prompts"):
        prefilled.told([b"[%b]" % answer(reason=FINISH, routed_experts=rows(1, 2, 3))])


@pytest.mark.parametrize("bodies", [[], [b"[DONE]"], [b"[]"]])
def test_an_empty_answer_is_none(bodies):
    with pytest.raises(Foreign, match="0 of 1 prompts"):
        made(**ROWS).told(bodies)


@pytest.mark.parametrize(
    "meta",
    [
        {"id": "b"},
        {"input_token_logprobs": None},
        {"input_token_logprobs": INPUTS[1:]},
        {"input_token_logprobs": [*INPUTS, INPUTS[0]]},
        {},
    ],
    ids=str,
)
def test_an_answer_to_something_else_is_none(meta):
    with pytest.raises((Foreign, NotJson)):
        made(**LOGPROBS).told([answer(reason=FINISH, **meta)])


def test_other_prompts_are_seen():
    prefilled = made(**ROWS)
    prefilled.told([answer(reason=FINISH, routed_experts=rows(1, 2))])
    with pytest.raises(Foreign, match="other prompts"):
        prefilled.take([event(prompt_tokens=4, reason=FINISH, routed_experts=rows(9, 9, 3))])


@pytest.mark.parametrize("start", [0, 1, 3, 9])
def test_logprobs_from_a_start_on(start):
    prefilled = made(return_logprob=True, logprob_start_len=start)
    given = INPUTS[start:]
    prefilled.told([answer(reason=FINISH, input_token_logprobs=given)])
    [meta] = metas(prefilled.take([event(input_token_logprobs=[])]))
    assert meta["input_token_logprobs"] == given


def test_logprobs_in_another_shape_than_decodes():
    """`return_flat_raw_top_logprobs`: keys that decode does not have, instead of one that it has."""
    prefilled = made(**LOGPROBS, top_logprobs_num=1)
    flat = {
        "input_top_logprobs_val_flat": [-1.5],
        "input_top_logprobs_idx_flat": [2],
        "input_top_logprobs_shape": [1, 1],
    }
    prefilled.told([answer(reason=FINISH, input_token_logprobs=INPUTS, **flat)])
    [meta] = metas(prefilled.take([event(input_token_logprobs=[], input_top_logprobs=[], output_token_logprobs=[])]))
    assert {name: meta.get(name) for name in flat} == flat
    assert "input_top_logprobs" not in meta
    assert meta["input_token_logprobs"] == INPUTS


def test_the_prompts_logprobs_are_told_once():
    """Not by a continuation."""
    prefilled = made(**LOGPROBS, begun=True)
    events = [event(input_token_logprobs=[])]
    assert prefilled.take(events) == events


IDS: dict[str, Any] = {"return_logprob": True, "token_ids_logprob": [3]}


@pytest.mark.parametrize("nothing", [None, []])
@pytest.mark.parametrize("begun", [False, True])
def test_chosen_ids_of_the_first_token(nothing, begun):
    """Where decode has none; in a cumulative stream again in each event, of deltas in the first."""
    prefilled = made(**IDS, begun=begun)
    inputs = {"input_token_logprobs": INPUTS[2:]}
    prefilled.told([answer(reason=FINISH, **inputs, output_token_ids_logprobs=[[[-1.5, 3, None]]])])
    name, other = "output_token_ids_logprobs", [[-2.5, 3, None]]
    events = [
        event(**{name: [nothing]}),
        event(completion_tokens=2, **{name: [nothing, other]}),
        event(completion_tokens=3, **{name: [other]}),
        event(completion_tokens=2, **{name: [nothing]}),
    ]
    first = [[-1.5, 3, None]]
    assert [meta[name] for meta in metas(prefilled.take(events))] == [[first], [first, other], [other], [nothing]]


def test_rows_that_prefill_does_not_tell_are_left_out_and_not_asked_for():
    prefilled = made(**ROWS, return_indexer_topk=True)
    prefilled.told([answer(reason=FINISH, routed_experts=rows(1, 2, 3))])
    assert {name: replay.owed for name, replay in prefilled._replays.items()} == {
        "routed_experts": True,
        "indexer_topk": False,
    }
    [meta] = metas(prefilled.take([event(reason=FINISH, routed_experts=rows(9, 9, 9), indexer_topk=rows(9, 9, 9))]))
    assert meta["routed_experts"] == rows(1, 2, 3)
    assert "indexer_topk" not in meta


@pytest.mark.parametrize("reason", [{"type": "abort", "message": "Aborted"}, {"type": "abort", "status_code": None}])
def test_an_abort_that_somebody_wished_is_told_apart(reason):
    found, _ = made(**ROWS).told([answer(reason=reason)])
    assert found is not None
    assert found.wished


def test_whitespace_is_decodes_own():
    """What nothing is added to passes as it came."""
    prefilled = made(**ROWS)
    prefilled.told([answer(reason=FINISH, routed_experts=rows(1, 2, 3))])
    events = [event()]
    assert list(prefilled.take(events)) == events


@pytest.mark.parametrize("nothing", [None, []])
def test_a_finish_of_deltas_takes_back_nothing(nothing):
    """The prefill worker's token came before its finish, which then has no rows."""
    prefilled = made(**IDS)
    rows = {"input_token_logprobs": INPUTS[2:], "output_token_ids_logprobs": [[[-1.5, 3, None]]]}
    after = {"input_token_logprobs": [], "output_token_ids_logprobs": nothing}
    prefilled.told([answer(**rows), answer(reason=FINISH, **after)])
    [meta] = metas(prefilled.take([event(output_token_ids_logprobs=[None], input_token_logprobs=[])]))
    assert meta["output_token_ids_logprobs"] == [[[-1.5, 3, None]]]
    assert meta["input_token_logprobs"] == INPUTS[2:]
