"""What is asked for in one request of several answers, and what each answer's own request says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyn_relay.formats.base import Answer, Bundle, NativeRequest
from dyn_relay.formats.sglang import batch
from dyn_relay.formats.sglang.batch import SPREAD, Spread, Unsplit, asked, shares
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.sglang.item import Item
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.traits import UNKNOWN
from dyn_testkit.worker import WorkerOptions
from dyn_testkit.worker.jobs import Reader

ENGINE = Reader(
    WorkerOptions(routed_experts=True, lora_adapters=("a", "b"), dp_size=4), lambda: "made up", lambda: None, lambda: 0
)


def request(body: dict[str, Any]) -> Request:
    return Request(NativeRequest("POST", "/generate", [], json.dumps(body).encode()))


def taken_apart(body: dict[str, Any]) -> list[batch.Share]:
    names = iter(range(10_000))
    return shares(request(body), lambda: f"fresh {next(names)}")


def column(values: st.SearchStrategy[Any], size: int, *, listed: bool = True) -> st.SearchStrategy[Any]:
    """One value for all, or a list with one for each."""
    return values | st.lists(values, min_size=size, max_size=size) if listed else values


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Any request for several answers that the engine takes."""
    size = draw(st.integers(1, 6))
    samples = draw(st.integers(1, 3))
    ids = st.lists(st.integers(0, 900), min_size=1, max_size=4)
    single = samples > 1 and draw(st.booleans())
    prompts = draw(ids if single else st.lists(ids, min_size=size, max_size=size))
    size = 1 if single else size
    params = st.fixed_dictionaries(
        {} if samples == 1 else {"n": st.just(samples)},
        optional={"max_new_tokens": st.integers(0, 9), "temperature": st.just(0.5), "sampling_seed": st.integers(0, 9)},
    )
    logprobs = {
        "return_logprob": column(st.booleans(), size, listed=samples == 1),
        "logprob_start_len": column(st.integers(-1, 3), size, listed=samples == 1),
        "top_logprobs_num": column(st.integers(0, 3), size, listed=samples == 1),
        "token_ids_logprob": column(st.lists(st.integers(0, 9), min_size=1), size, listed=samples == 1),
    }
    others = {
        "rid": st.just("job") | st.just([f"r{at}" for at in range(size)]) | st.none(),
        "sampling_params": column(params, size, listed=not single or samples > 1),
        "lora_path": column(st.sampled_from(["a", "b"]), size),
        "return_prompt_token_ids": st.booleans(),
        "return_routed_experts": st.booleans(),
        "routed_dp_rank": st.integers(0, 3),
        "stream": st.booleans(),
        "priority": st.integers(0, 9),
        "image_data": st.none() | st.just([]),
    }
    body = draw(st.fixed_dictionaries({"input_ids": st.just(prompts)}, optional={**others, **logprobs}))
    if samples > 1 and "sampling_params" not in body:
        body["sampling_params"] = {"n": samples}
    return body


@given(bodies())
def test_each_answers_own_request_asks_for_what_the_whole_asked(body: dict[str, Any]) -> None:
    """By another's reading of the whole and of the parts, that of the testkit's engine: the same generations."""
    whole = ENGINE.jobs(body)
    parts = taken_apart(body)
    if asked(request(body)).several:
        assert [replace(ENGINE.jobs(json.loads(part.request.body))[0], rid="", index=None) for part in parts] == [
            replace(job, rid="", index=None, copies=1, sampling=replace(job.sampling, n=1)) for job in whole
        ]
        assert asked(request(body)).generations == len(whole) == len(parts)
        if whole[0].rid != "made up":
            assert [part.rid for part in parts] == [job.rid for job in whole]
            assert [part.request.rid for part in parts] == [job.rid for job in whole]
        else:
            assert len({part.rid for part in parts}) == len(parts)
            assert all(part.rid.startswith("fresh") and not part.request.rid for part in parts)
    else:
        assert parts == []
        assert (len(whole), asked(request(body)).generations) == (1, 1)


def test_samples_are_reached_by_the_clients_name() -> None:
    """Stock makes up the rids of samples; here an abort by the client's own name means them all."""
    body = {"input_ids": [[5], [6]], "sampling_params": {"n": 2}}
    assert [part.alias for part in taken_apart({**body, "rid": "job"})] == ["job"] * 4
    assert [part.alias for part in taken_apart({**body, "rid": ["x", "y"]})] == ["x", "x", "y", "y"]
    assert [part.alias for part in taken_apart({**body, "sampling_params": {}, "rid": "job"})] == ["", ""]


def test_a_seed_is_every_samples() -> None:
    """Stock 0.5.23 gives all samples of a prompt the same parameters: with a seed that counts, the same answer."""
    parts = taken_apart({"input_ids": [5], "sampling_params": {"n": 3, "sampling_seed": 7}})
    assert [json.loads(part.request.body)["sampling_params"] for part in parts] == [{"sampling_seed": 7}] * 3


BATCH: dict[str, Any] = {"input_ids": [[5, 6], [7]]}
#: What keeps a request whole, and the reason that its header gives.
KEPT: list[tuple[dict[str, Any], str]] = [
    ({"rid": ["x", "x"]}, "rid"),
    ({"rid": ["x"]}, "rid"),
    ({"rid": ["x", ""]}, "rid"),
    ({"rid": ["x", 5]}, "rid"),
    ({"rid": ""}, "rid"),
    ({"rid": 5}, "rid"),
    ({"input_ids": [[5], []]}, "input_ids"),
    ({"input_ids": [[5], ["x"]]}, "input_ids"),
    ({"input_ids": [[5], 6]}, "input_ids"),
    ({"text": ["a"]}, "input_ids"),
    ({"input_ids": None, "text": ["a", 5]}, "input_ids"),
    ({"input_ids": None, "text": []}, "batch"),
    ({"sampling_params": [{}]}, "sampling_params"),
    ({"sampling_params": [{}, {}, {}]}, "sampling_params"),
    ({"sampling_params": [{"n": 2}, {}]}, "n"),
    ({"sampling_params": {"n": 0}}, "n"),
    ({"sampling_params": {"n": None}}, "n"),
    ({"sampling_params": {"n": True}}, "n"),
    ({"sampling_params": {"n": 2.0}}, "n"),
    ({"sampling_params": {"n": 2, "beam_width": 2}}, "beam_width"),
    ({"sampling_params": {"n": 2}, "return_logprob": [True, False]}, "return_logprob"),
    ({"sampling_params": {"n": 2}, "token_ids_logprob": [[1], [2]]}, "token_ids_logprob"),
    ({"return_logprob": [True]}, "return_logprob"),
    ({"return_logprob": [True, None]}, "return_logprob"),
    ({"lora_path": ["a"]}, "lora_path"),
    ({"extra_key": ["a", "b", "c"]}, "extra_key"),
    ({"a_field_of_another_release": [1, 2]}, "batch"),
    *[({name: [1, 2]}, name) for name, rule in SPREAD.items() if rule is Spread.WHOLE],
    *[({name: "x"}, name) for name, rule in SPREAD.items() if rule is Spread.WHOLE],
]


@pytest.mark.parametrize(("fields", "reason"), KEPT, ids=[json.dumps(fields) for fields, _ in KEPT])
def test_what_cannot_be_spread_with_certainty_stays_whole(fields: dict[str, Any], reason: str) -> None:
    """N6: and its header says why."""
    body = {**BATCH, **fields}
    with pytest.raises(Unsplit) as caught:
        taken_apart(body)
    assert caught.value.reason == reason
    native = NativeRequest("POST", "/generate", [], json.dumps(body).encode())
    whole = SglangFormat().split(native, lambda: "ours")
    assert not isinstance(whole, Bundle)
    assert whole.admit(UNKNOWN).reason == reason
    assert whole.dispatch(UNKNOWN, "ours", 0.0).body == native.body


@pytest.mark.parametrize("samples", [{}, {"n": 1}, {"n": 0}, {"n": None}, None])
def test_one_answer_is_not_taken_apart(samples: dict[str, Any] | None) -> None:
    """Nor is one text with a list of ids: the text decides (0.5.23); the ids are for the engine to say something of."""
    for body in ({"input_ids": [5, 6], "sampling_params": samples}, {**BATCH, "text": "a", "sampling_params": samples}):
        assert taken_apart(body) == []
        assert asked(request(body)).generations == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input_ids":[[5]],"sampling_params":7}', b'{"stream":3}'])
def test_what_cannot_be_read_counts_as_one(body: bytes) -> None:
    native = NativeRequest("POST", "/generate", [], body)
    assert asked(Request(native)).generations == 1
    assert not isinstance(SglangFormat().split(native, lambda: "ours"), Bundle)


@pytest.mark.parametrize("more", [{}, {"rid": ["x", "y"]}, {"input_ids": [5], "sampling_params": {"n": 2}}])
def test_an_abort_is_not_one_answer_for_several(more: dict[str, Any]) -> None:
    """Aborted while no worker has it: what an engine says of one answer is no list, nor a stream of several."""
    for body, made in (({**BATCH, **more}, False), ({"input_ids": [5], "session_params": {"id": "s"}}, True)):
        native = NativeRequest("POST", "/generate", [], json.dumps(body).encode())
        opened = SglangFormat().open(native, "ours")
        assert not opened.admit(UNKNOWN).migratable
        assert (opened.abort(1.0) is not None) is made


def test_a_request_for_too_many_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"input_ids": [[5]] * batch.MOST_ANSWERS}
    assert len(taken_apart(most)) == batch.MOST_ANSWERS
    with pytest.raises(Unsplit, match="batch"):
        taken_apart({"input_ids": [[5]] * (batch.MOST_ANSWERS + 1)})
    with pytest.raises(Unsplit, match="batch"):
        taken_apart({"input_ids": [5], "sampling_params": {"n": batch.MOST_ANSWERS + 1}})
    monkeypatch.setattr(batch, "MOST_BYTES", 100)
    with pytest.raises(Unsplit, match="batch"):
        taken_apart({"input_ids": [5] * 20, "sampling_params": {"n": 3}})


# -- the answers of items ----------------------------------------------------------------------------------------------


def item(stream: bool = True) -> Item:
    body = json.dumps({**BATCH, "rid": "job", "stream": stream, "sampling_params": {"max_new_tokens": 4}}).encode()
    bundle = SglangFormat().split(NativeRequest("POST", "/generate", [], body), lambda: "ours")
    assert isinstance(bundle, Bundle)
    made = bundle.items[1]
    assert isinstance(made, Item)
    made.admit(UNKNOWN)
    made.dispatch(UNKNOWN, made.rid, 0.0)
    made.head(200, [(b"content-type", b"text/event-stream")])
    return made


def event(ids: list[int], **meta: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"id": "job_1", "completion_tokens": len(ids), "prompt_tokens": 1, **meta}}


def test_an_event_is_respelled_where_its_spelling_would_hide_its_end() -> None:
    """Line ends within the JSON, several data lines, CRLF: legal, and not SGLang's; the index stands in its place."""
    data = json.dumps(event([5]), indent=1).encode()
    odd = b"".join(b"data: " + line + b"\r\n" for line in data.split(b"\n")) + b"\r\n"
    out = item().feed([(odd, data), (b": {}\n\n", b"")], 1.0)
    first, comment, rest = out.split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: ")) == {**event([5]), "index": 1}
    assert (comment[:2], rest) == (b": ", b"")


def test_whose_error_it_is() -> None:
    """An abort with a status is an event of its answer; an error object is the whole's, and has no index."""
    aborted = event([], finish_reason={"type": "abort", "message": "too long", "status_code": 400})
    data = json.dumps(aborted).encode()
    one = item()
    assert one.feed([(b"data: " + data + b"\n\n", data)], 1.0) == b""
    assert not one.outright
    assert json.loads(one.last_words().removeprefix(b"data: ")) == {**aborted, "index": 1}
    data = json.dumps({"error": {"message": "no", "code": 400}}).encode()
    other = item()
    assert other.feed([(b"data: " + data + b"\n\n", data)], 1.0) == b""
    assert other.outright
    assert other.last_words() == b"data: " + data + b"\n\n"


def test_our_own_errors_say_which_answer_they_are_about() -> None:
    said = json.loads(item().failure_event(502, "no_survivor", "all dead").removeprefix(b"data: "))
    assert (said["index"], said["error"]["reason"]) == (1, "no_survivor")
    answer: Answer = item(stream=False).failure(502, "no_survivor", "all dead", started=True)
    assert (json.loads(answer.body)["index"], json.loads(answer.body)["reason"]) == (1, "no_survivor")


@pytest.mark.parametrize("rid", ['[1e999,"b"]', "1e999", '{"a":1e999}', "[" * 5000 + "]" * 5000])
def test_rids_that_no_engine_reads(rid: str) -> None:
    """The engine shall say so itself."""
    body = b'{"input_ids":[[1],[2]],"rid":%b}' % rid.encode()
    opened = SglangFormat().split(NativeRequest("POST", "/generate", [], body), lambda: "ours")
    assert not isinstance(opened, Bundle)
    assert opened.admit(UNKNOWN).reason in ("rid", "body")
    assert opened.dispatch(UNKNOWN, "ours", 0.0).body == body
