"""What a split request's items make together is what stock was recorded to answer to the whole."""

from __future__ import annotations

import json
import re

import captured
import pytest
from test_sglang_replay import JSON, same

from dyn_relay.formats.base import Bundle, End, Exchange, NativeRequest, Reading
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import UNKNOWN

FOLDERS = ("cumulative", "incremental", "tokenizer")
#: Batches of one and of two, samples, both, and lists of parameters with a list of rids.
KINDS = ("batch1", "batch2", "batch2_n2", "batch2_params_list", "n2")
STREAMS = [f"{folder}/s_{kind}" for folder in FOLDERS for kind in KINDS] + ["moe/s_n2_routed"]
UNARY = [f"{folder}/u_{kind}" for folder in FOLDERS for kind in KINDS]


def split(body: bytes, rids: list[str]) -> Bundle:
    """Split a recorded request; `rids`: those that the recorded engine made up, in the order of the answer."""
    names = iter(rids)
    opened = SglangFormat().split(NativeRequest("POST", "/generate", JSON, body), lambda: next(names, "another"))
    assert isinstance(opened, Bundle)
    return opened


def of(data: bytes) -> int:
    """Which answer an event is part of."""
    return json.loads(data)["index"]


def rids_in(name: str) -> list[str]:
    """The rid of each answer of a recorded stream."""
    found = {of(data): json.loads(data)["meta_info"]["id"] for _, data in captured.wire(name).events[:-1]}
    return [found[index] for index in range(len(found))]


def alone(data: bytes) -> bytes:
    """The event that the engine would have sent to a request for this answer only."""
    return re.sub(rb',"index":\d+\}$', b"}", data)


def fed(item: Exchange, rid: str) -> Exchange:
    item.admit(UNKNOWN)
    item.dispatch(UNKNOWN, rid, 5.0)
    assert item.head(200, [(b"content-type", b"text/event-stream; charset=utf-8")]) is Reading.EVENTS
    return item


@pytest.mark.parametrize("name", STREAMS)
def test_the_items_streams_make_the_recorded_one(name: str) -> None:
    """Byte for byte, in the recorded order: keys and their order, `index`, rids, framing, one `[DONE]` at the end."""
    recorded = captured.wire(name)
    bundle = split(captured.body(name), rids_in(name))
    assert [item.rid for item in bundle.items] == rids_in(name)
    items = [fed(item, item.rid) for item in bundle.items]
    out = b""
    for _, data in recorded.events[:-1]:
        data, item = alone(data), items[of(data)]
        out += item.feed([(b"data: " + data + b"\n\n", data)], 6.0)
        if json.loads(data)["meta_info"]["finish_reason"] is not None:
            out += item.feed([(b"data: [DONE]\n\n", b"[DONE]")], 6.0)
    assert [item.end for item in items] == [End.FINISHED] * len(items)
    assert out + bundle.terminator == recorded.body


@pytest.mark.parametrize("name", UNARY)
def test_the_items_answers_make_the_recorded_list(name: str) -> None:
    """Prompt by prompt, sample by sample; each as stock's, made of the events of a stream."""
    recorded, stream = captured.wire(name), name.replace("/u_", "/s_")
    bundle = split(captured.body(name), rids_in(stream))
    items = [fed(item, item.rid) for item in bundle.items]
    for _, data in captured.wire(stream).events[:-1]:
        assert items[of(data)].feed([(b"", alone(data))], 6.0) == b""
    for item in items:
        item.feed([(b"", b"[DONE]")], 6.0)
    answer = bundle.join([item.answer(6.5) for item in items])
    assert (answer.status, answer.content_type) == (200, dict(recorded.headers)[b"content-type"])
    got, wanted = (json.loads(data, object_pairs_hook=list) for data in (answer.body, recorded.body))
    assert len(got) == len(wanted)
    same(got, wanted, sampled=name.endswith("n2"))


@pytest.mark.parametrize("mode", ["s", "u"])
@pytest.mark.parametrize("kind", ["err_batch_rid_dup", "err_batch_rid_mismatch"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_stock_refuses_stays_whole(folder: str, kind: str, mode: str) -> None:
    """Its own words come back."""
    name = f"{folder}/{mode}_{kind}"
    body, recorded = captured.body(name), captured.wire(name)
    opened = SglangFormat().split(NativeRequest("POST", "/generate", JSON, body), lambda: "ours")
    assert not isinstance(opened, Bundle)
    assert opened.admit(UNKNOWN).reason == "rid"
    assert opened.dispatch(UNKNOWN, "ours", 5.0).body == body
    if opened.head(recorded.status, recorded.headers) is Reading.WHOLE:
        opened.body(recorded.body, 6.0)
        assert (opened.answer(6.5).status, opened.answer(6.5).body) == (recorded.status, recorded.body)
    else:
        opened.feed(recorded.events, 6.0)
        assert opened.last_words() == recorded.body


def test_all_recordings_of_several_answers_are_here() -> None:
    """No vacuous pass, and none that was forgotten."""
    several = [
        name
        for folder in (*FOLDERS, "moe")
        for name in captured.names(folder, "s_")
        if b'"index":' in captured.wire(name).body
    ]
    assert sorted(several) == sorted(STREAMS)
