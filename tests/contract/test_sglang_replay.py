"""Every recorded exchange, replayed: streams come out byte for byte, and fold into the recorded unary answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import captured
import pytest

from dyn_relay.formats.base import End, NativeRequest, Reading, Rejected
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import UNKNOWN, Traits

JSON = [(b"content-type", b"application/json")]
FOLDERS = ("cumulative", "incremental", "tokenizer", "moe")
STREAMS = [name for folder in FOLDERS for name in captured.names(folder, "s_")]
PAIRS = [name for name in STREAMS if captured.exists(name.replace("/s_", "/u_"))]

#: Measured, or dependent on what the engine had cached when it was asked.
VARIES = (
    "cached_tokens",
    "cached_tokens_details",
    "e2e_latency",
    "queue_time",
    "decode_throughput",
    "first_token_latency",
)
#: Sampled without a seed that counts: two runs differ.
SAMPLED = ("sampled_seed", "sampled_top_p_k", "no_sampling_params")
#: These kill the engine, or are refused before one sees them.
POISON = ("neg_id", "oov_id", "err_logprob_start_neg", "err_top_logprobs_huge")


def exchange(body: bytes, traits: Traits = UNKNOWN, rid: str = "ours") -> SglangExchange:
    """`rid`: under which the recorded engine answered; it never answers under another one."""
    opened = SglangFormat().open(NativeRequest("POST", "/generate", JSON, body), rid)
    opened.admit(traits)
    return opened


def replay(name: str, opened: SglangExchange) -> bytes:
    """Feed a recorded answer; returns what a streaming client gets."""
    answer = captured.wire(name)
    opened.dispatch(UNKNOWN, opened.rid, 5.0)
    reading = opened.head(answer.status, answer.headers)
    if reading is Reading.WHOLE:
        opened.body(answer.body, 6.0)
        return b""
    assert reading is Reading.EVENTS
    return b"".join(opened.feed([event], 6.0) for event in answer.events)


def dead(name: str) -> bool:
    return name.partition("/")[2][2:] in POISON


@pytest.mark.parametrize("name", [name for name in STREAMS if not dead(name)])
def test_stream_is_untouched(name: str) -> None:
    """Law 7."""
    answer = captured.wire(name)
    opened = exchange(captured.body(name), rid=captured.rid(name))
    out = replay(name, opened)
    assert opened.end is not None
    if opened.end is End.FINISHED:
        assert out == answer.body
    elif answer.status == 200:
        assert opened.end is End.REFUSED
        assert out == b""
        assert opened.last_words() == answer.body
        assert opened.delivered == 0
    else:
        assert opened.end is End.REFUSED
        assert (opened.answer(7.0).status, opened.answer(7.0).body) == (answer.status, answer.body)


@pytest.mark.parametrize("name", [name for name in STREAMS if not dead(name) and captured.wire(name).status == 200])
def test_all_events_in_one_read(name: str) -> None:
    one, many = (exchange(captured.body(name), rid=captured.rid(name)) for _ in range(2))
    answer = captured.wire(name)
    one.dispatch(UNKNOWN, one.rid, 5.0)
    one.head(answer.status, answer.headers)
    assert one.feed(answer.events, 6.0) == replay(name, many)
    assert (one.end, one.delivered) == (many.end, many.delivered)


@pytest.mark.parametrize("name", [name for name in PAIRS if not dead(name)])
def test_unary_is_the_fold_of_the_stream(name: str) -> None:
    """Law 6, and the statuses and bodies of errors."""
    recorded = captured.wire(name.replace("/s_", "/u_"))
    opened = exchange(captured.body(name.replace("/s_", "/u_")), rid=captured.rid(name))
    if not opened.verdict.migratable:
        return  # passed on as it is, and answered by the engine itself
    assert replay(name, opened) == b""
    assert opened.end in (End.FINISHED, End.REFUSED)
    answer = opened.answer(6.5)
    assert answer.status == recorded.status
    got, wanted = (json.loads(data, object_pairs_hook=list) for data in (answer.body, recorded.body))
    same(got, wanted, sampled=name.partition("_")[2] in SAMPLED)
    if answer.status == 200:
        assert json.loads(answer.body)["meta_info"]["id"] == opened.rid


def same(got: Any, wanted: Any, sampled: bool, key: str = "") -> None:
    """Equal, order of keys included, up to what varies from run to run."""
    if key in VARIES or key.endswith(("_ts", "_time", "_wait")):
        return
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], tuple):
        assert [name for name, _ in got] == [name for name, _ in wanted]
        for (name, one), (_, other) in zip(got, wanted, strict=True):
            same(one, other, sampled, name)
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            same(one, other, sampled, key)
    elif isinstance(wanted, float):
        # Batches of other shapes round differently; the tolerance is the one measured on the live engine.
        assert sampled or got == pytest.approx(wanted, abs=5e-5)
    elif key == "id":
        assert len(got) == len(wanted)  # each recording has its own
    elif not sampled:
        assert got == wanted


def test_what_is_covered() -> None:
    """No vacuous pass: most pairs are folded, in each dialect."""
    folded = [
        name
        for name in PAIRS
        if not dead(name) and exchange(captured.body(name.replace("/s_", "/u_"))).verdict.migratable
    ]
    assert sum(name.startswith("cumulative") for name in folded) > 35
    assert sum(name.startswith("incremental") for name in folded) > 35
    assert sum(name.startswith("tokenizer") for name in folded) > 35
    assert {"cumulative/s_prompt_top_logprobs", "moe/s_routed"} <= set(folded)


@pytest.mark.parametrize("name", ["neg_id", "err_logprob_start_neg"])
@pytest.mark.parametrize("mode", ["s", "u"])
def test_poison_is_refused_here(name: str, mode: str) -> None:
    """The recordings are of engines that died, or were wedged."""
    with pytest.raises(Rejected) as caught:
        exchange(captured.body(f"cumulative/{mode}_{name}"))
    answer = caught.value.answer
    if mode == "u":
        assert answer.status == 400
        assert set(json.loads(answer.body)["error"]) == {"message"}
    else:
        recorded = captured.wire("cumulative/s_err_max_neg").events
        mine = answer.body.split(b"\n\n")
        assert answer.status == 200
        shapes = [json.loads(data.removeprefix(b"data: "))["error"] for data in (mine[0], recorded[0][0])]
        assert [{**shape, "message": ""} for shape in shapes] == [{**shapes[1], "message": ""}] * 2
        assert mine[1:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize("mode", ["stream", "unary"])
def test_duplicate_rid(mode: str) -> None:
    """C4: the answer to a rid that is still live is stock's, byte for byte."""
    name = f"kill/duprid_second_{mode}"
    recorded = captured.wire(name)
    answer = SglangFormat().duplicate(NativeRequest("POST", "/generate", JSON, captured.body(name)), "dup")
    assert (answer.status, answer.body) == (recorded.status, recorded.body)
    assert (b"content-type", answer.content_type) in recorded.headers


@pytest.mark.parametrize("name", ["abort_all_midstream", "abort_rid_midstream", "abort_rid_midstream_logprob"])
def test_abort_is_relayed(name: str) -> None:
    """H1: somebody's wish, never resumed; its last event carries a token like any other."""
    opened = exchange(captured.body(f"kill/{name}"), rid=captured.rid(f"kill/{name}"))
    assert replay(f"kill/{name}", opened) == captured.wire(f"kill/{name}").body
    assert opened.end is End.ABORTED
    last = json.loads(captured.wire(f"kill/{name}").events[-2][1])
    assert opened.delivered == last["meta_info"]["completion_tokens"]


def test_abort_unary() -> None:
    """The unary answer to an abort is a 200 with what there is, in stock's order of keys."""
    name = "kill/abort_rid_midstream_logprob"
    body = json.loads(captured.body(name))
    opened = exchange(json.dumps({**body, "stream": False}).encode(), rid=captured.rid(name))
    replay(name, opened)
    answer = opened.answer(7.0)
    got, shape = json.loads(answer.body), json.loads(captured.wire("kill/abort_rid_unary").body)
    assert answer.status == 200
    assert opened.end is End.ABORTED
    assert got["meta_info"]["finish_reason"] == shape["meta_info"]["finish_reason"]
    assert len(got["output_ids"]) == len(got["meta_info"]["output_token_logprobs"]) == 28
    rows = ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length")
    assert [key for key in got["meta_info"] if key not in rows] == list(shape["meta_info"])


@pytest.mark.parametrize("name", ["sigkill_group_stream", "sigkill_main_stream", "sigkill_scheduler_stream"])
def test_a_killed_engine_leaves_whole_events(name: str) -> None:
    """What a killed engine had sent is delivered; nothing says that it ended, and a continuation is due."""
    opened = exchange(captured.body(f"kill/{name}"), rid=captured.rid(f"kill/{name}"))
    replay(f"kill/{name}", opened)
    assert opened.end is None
    assert opened.delivered > 15
    assert opened.complete(7.0) is None
    sent = json.loads(opened.dispatch(UNKNOWN, "again", 8.0).body)
    asked = json.loads(captured.body(f"kill/{name}"))
    last = json.loads(captured.wire(f"kill/{name}").events[-1][1])["meta_info"]["completion_tokens"]
    assert opened.delivered == last
    assert len(sent["input_ids"]) == len(asked["input_ids"]) + last
    assert sent["sampling_params"]["max_new_tokens"] == asked["sampling_params"]["max_new_tokens"] - last


@pytest.mark.parametrize(
    ("folder", "text", "epoch"),
    [
        ("cumulative", False, "878625594 4.030382057999759"),
        ("tokenizer", True, "521669857 1.4787241840003844"),
    ],
)
def test_traits(folder: str, text: bool, epoch: str) -> None:
    """They tell one process from the next, too."""
    infos = {f"/{name}": captured.wire(f"{folder}/info_{name}").body for name in ("model_info", "server_info")}
    traits = SglangFormat().traits(infos)
    found = Traits("0.5.23", "models/qwen3-fp32", "default", text, False, {}, 2042, False, False, False)
    assert traits == replace(found, dp_size=1, epoch=epoch, role="regular", bootstrap_port=8998)
    assert SglangFormat().traits({}) == UNKNOWN
