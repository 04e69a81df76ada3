"""Every field of the contract, one by one: what becomes of it in a request, and in an answer of one to four attempts.

`docs/fields.md` names these tests; what is expected is written down here a second time, apart from the code's tables.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from sglang_kit import DIALECTS, DONE, SSE_HEAD, dumps, request, sse
from test_sglang_admission import PLAIN, SAMPLING, TOP

from dyn_relay.formats.base import CannotComplete, End
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import Traits
from dyn_testkit.worker import fields

STOCK = Traits(version="0.5.23", incremental=False, sampling_defaults={})
NAMES = ("mine", "second", "third", "fourth")


# Requests -------------------------------------------------------------------------------------------------------------

#: A value that does not forbid a continuation, where any would do not; spelled as no writer would.
NEUTRAL: dict[str, bytes] = {
    "rid": b'"mine"',
    "text": b'"ids  win"',
    "input_ids": b"[1, 2]",
    "sampling_params": b'{"max_new_tokens":9}',
    "logprob_start_len": b"0",
    "stream": b"true",
    "return_prompt_token_ids": b"true",
    "session_id": b'"a"',
}
#: What the three attempts send if it is not the same: the first, one after no token, one after two. None: left out.
CHANGED: dict[str, tuple[bytes | None, ...]] = {
    "rid": (b'"mine"', b'"second"', b'"third"'),
    "text": (b'"ids  win"', b'"ids  win"', None),
    "input_ids": (b"[1, 2]", b"[1, 2]", b"[1, 2,7,8]"),
    "sampling_params": (b'{"max_new_tokens":9}', b'{"max_new_tokens":9}', b'{"max_new_tokens":7}'),
    "logprob_start_len": (b"0", b"0", b"-1"),
    "kv_hints": (b'{ "x" : 1.50 }', None, None),
    "routed_dp_rank": (b'{ "x" : 1.50 }', None, None),
    "data_parallel_rank": (b'{ "x" : 1.50 }', None, None),
}
NEUTRAL_SAMPLING: dict[str, bytes] = {
    **dict.fromkeys(("n", "repetition_penalty"), b"1"),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), b"0.0"),
    **dict.fromkeys(("beam_width", "json_schema", "regex", "ebnf", "structural_tag", "stop_regex"), b"null"),
    **dict.fromkeys(("custom_params", "watermark", "choice"), b"null"),
    "stop": b'["x" , "y"]',
    "stop_token_ids": b"[5 , 6]",
    "max_new_tokens": b"9",
    "min_new_tokens": b"3",
    "ignore_eos": b"false",
    "stream_interval": b"4",
    "sampling_seed": b"9007199254740993",
}
CHANGED_SAMPLING: dict[str, tuple[bytes | None, ...]] = {
    "max_new_tokens": (b"9", b"9", b"7"),
    "min_new_tokens": (b"3", b"3", b"1"),
}
ODD_VALUE = b'{ "x" : 1.50 }'


def opened(body: bytes) -> SglangExchange:
    exchange = SglangFormat().open(request(body), "given")
    exchange.admit(STOCK)
    return exchange


def attempts(body: bytes) -> list[bytes]:
    """What three attempts send: the first, another one after no token, and one after two."""
    exchange, sent = opened(body), []
    assert exchange.verdict.migratable, exchange.verdict
    for name, total in zip(NAMES[:3], (0, 2, 0), strict=True):
        sent.append(exchange.dispatch(STOCK, name, 0.0).body)
        exchange.head(200, SSE_HEAD)
        if total:
            event = {"output_ids": [7, 8], "meta_info": {"id": name, "finish_reason": None, "completion_tokens": 2}}
            exchange.feed([sse(event | {"prompt_token_ids": [5]})], 1.0)
        assert exchange.complete(2.0) is None
    return sent


def of(body: bytes, name: str, inside: str = "") -> bytes | None:
    found = msgspec.json.decode(body, type=dict[str, Raw])
    if inside:
        found = msgspec.json.decode(found[inside], type=dict[str, Raw])
    return bytes(found[name]) if name in found else None


def body_of(top: dict[str, bytes], params: dict[str, bytes] | None = None) -> bytes:
    def spelled(some: dict[str, bytes]) -> bytes:
        return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in some.items()) + b"}"

    plain = {name: NEUTRAL[name] for name in ("rid", "input_ids", "sampling_params", "stream")}
    return spelled({**plain, **({"sampling_params": spelled(params)} if params else {}), **top})


REFUSED_TOP = sorted({name for name, _ in TOP} | {"text"})
REFUSED_SAMPLING = sorted({name for name, _ in SAMPLING})


@pytest.mark.parametrize("name", fields.REQUEST)
def test_request_field(name: str) -> None:
    """In the client's own bytes wherever it is not changed; the first attempt of a stream is the client's body."""
    value = NEUTRAL.get(name, b"null" if name in REFUSED_TOP else ODD_VALUE)
    body = body_of({name: value})
    sent = attempts(body)
    assert sent[0] == body
    assert tuple(of(one, name) for one in sent) == CHANGED.get(name, (value, value, value))


@pytest.mark.parametrize("name", fields.SAMPLING)
def test_sampling_field(name: str) -> None:
    value = NEUTRAL_SAMPLING.get(name, ODD_VALUE)
    body = body_of({}, {"max_new_tokens": b"9", name: value})
    sent = attempts(body)
    assert sent[0] == body
    found = tuple(of(one, name, "sampling_params") for one in sent)
    assert found == CHANGED_SAMPLING.get(name, (value, value, value))


def test_a_unary_client_is_streamed_for() -> None:
    sent = attempts(body_of({"stream": b"false"}))
    assert [of(one, "stream") for one in sent] == [b"true"] * 3
    assert [of(one, "stream_interval", "sampling_params") for one in sent] == [b"32"] * 3


def test_a_text_prompts_ids_are_asked_for() -> None:
    sent = attempts(body_of({"text": b'"hi"', "input_ids": b"null", "return_prompt_token_ids": b"false"}))
    assert [of(one, "return_prompt_token_ids") for one in sent] == [b"true", b"true", b"false"]
    assert [of(one, "input_ids") for one in sent] == [b"null", b"null", b"[5,7,8]"]


def refuse(name: str, body: dict[str, Any]) -> None:
    """It is named, passed on as it came, and its loss is loud."""
    data = dumps(body)
    exchange = SglangFormat().open(request(data), "given")
    assert exchange.admit(Traits()).reason == name
    assert exchange.dispatch(STOCK, "mine", 0.0).body == data
    exchange.head(200, SSE_HEAD)
    if exchange.streaming:
        event = {"output_ids": [7], "meta_info": {"id": "mine", "finish_reason": None, "completion_tokens": 1}}
        assert exchange.feed([sse(event)], 1.0) == sse(event)[0]
        with pytest.raises(CannotComplete, match=name):
            exchange.complete(2.0)


@pytest.mark.parametrize("name", REFUSED_TOP)
def test_refused_field(name: str) -> None:
    for value in [5] if name == "text" else [value for tried, value in TOP if tried == name]:
        ids = {} if name == "text" else {"input_ids": [1]}
        refuse(name, {"stream": True, "rid": "mine", **ids, "sampling_params": {"max_new_tokens": 9}, name: value})


@pytest.mark.parametrize("name", REFUSED_SAMPLING)
def test_refused_sampling_field(name: str) -> None:
    for value in [value for tried, value in SAMPLING if tried == name]:
        refuse(name, {**PLAIN, "stream": True, "rid": "mine", "sampling_params": {"max_new_tokens": 9, name: value}})


# Answers --------------------------------------------------------------------------------------------------------------

#: What each field of `meta_info` becomes; the words are those of the cases below.
BECOMES: dict[str, tuple[str, ...]] = {
    "name": ("id",),
    "reason": ("finish_reason",),
    "first": (
        *("prompt_tokens", "cached_tokens", "cached_tokens_details", "image_tokens", "audio_tokens", "video_tokens"),
        *("storage_prefetch_wait", "storage_staging_wait", "forward_entry_time", "prefill_finished_time", "queue_time"),
        *(name for name in fields.META_INFO if name.startswith("input_")),
    ),
    "shifted": ("completion_tokens", "output_token_logprobs_length", "output_token_sampling_mask_length"),
    "summed": (
        *("num_retractions", "reasoning_tokens", "spec_num_correct_drafts", "spec_num_proposed_drafts"),
        *("spec_verify_ct", "spec_correct_drafts_histogram", "spec_cap_lens_histogram"),
    ),
    "ratio": ("spec_accept_rate", "spec_accept_length"),
    "rows": (
        *("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"),
        *("output_token_sampling_mask", "output_token_sampling_logprobs"),
    ),
    "spans": ("weight_versions",),
    "measured": (
        *("e2e_latency", "first_token_latency", "decode_throughput"),
        *("request_received_ts", "api_server_dispatch_finish_ts"),
    ),
    "sent": ("response_sent_to_client_ts",),
    "latest": (
        *("weight_version", "dp_rank", "routed_experts", "indexer_topk", "request_finished_ts"),
        *("spec_cap_length", "spec_block_accept_length"),
    ),
    "uncontinued": (
        *("hidden_states", "beam_results", "sequence_score"),
        *(name for name in fields.META_INFO if name.startswith("output_top_logprobs_")),
    ),
}
KIND = {name: kind for kind, names in BECOMES.items() for name in names}


def test_every_field_has_one_kind() -> None:
    assert set(KIND) == set(fields.META_INFO)
    assert sum(map(len, BECOMES.values())) == len(fields.META_INFO)


def row(attempt: int, at: int) -> list[Any]:
    return [-1.50 - attempt, at, None]


def value(name: str, attempt: int, total: int, dialect: str) -> Any:
    """What an attempt's engine says once `total` of its tokens are there."""
    match KIND[name]:
        case "shifted":
            return total
        case "first" if name == "prompt_tokens":
            return 2 + 2 * attempt
        case "summed":
            return [1] * (attempt + 1) if name.endswith("histogram") else attempt + 1
        case "rows":
            return [row(attempt, at) for at in range(total - 1 if dialect == "incremental" else 0, total)]
        case "measured" | "sent":
            return 1000.0 + 10 * attempt
        case _:
            return {"of": attempt}


def said(name: str, attempt: int, total: int, dialect: str, last: bool) -> tuple[bytes, bytes]:
    """The event of an attempt's token; attempts have two each."""
    meta: dict[str, Any] = {"id": NAMES[attempt], "finish_reason": None, "completion_tokens": total}
    if last:
        meta["finish_reason"] = {"type": "length", "length": 2, "matched": "m", "message": "said"}
    if name == "weight_versions":
        meta["weight_version"] = f"v{attempt}"
        if last:
            meta[name] = [{"version": f"v{attempt}", "start": 0, "end": 2}]
    elif KIND[name] == "ratio":
        meta |= {name: 0.125, "spec_num_correct_drafts": attempt + 1, "spec_num_proposed_drafts": 4}
        meta |= {"spec_verify_ct": 1}
    elif name not in ("id", "completion_tokens", "finish_reason"):
        meta[name] = value(name, attempt, total, dialect)
    ids = [10 * attempt + at for at in range(total)]
    return sse({"output_ids": ids if dialect == "cumulative" else ids[-1:], "meta_info": meta})


def expected(name: str, attempt: int, total: int, dialect: str, stream: bool, last: bool) -> Any:
    """What the client sees of it then; `...` for nothing."""
    base, now = 2 * attempt, 10.0 * attempt + total
    match KIND[name]:
        case "name":
            return "mine"
        case "reason":
            # The engine's own words, `length` shifted.
            return {"type": "length", "length": base + 2, "matched": "m", "message": "said"} if last else None
        case "first":
            return 2 if name == "prompt_tokens" else {"of": 0}
        case "shifted":
            return base + total
        case "summed" if name.endswith("histogram"):
            return [attempt + 1 - at for at in range(attempt + 1)]
        case "summed":
            return sum(range(attempt + 2))
        case "ratio":
            drafts = sum(range(attempt + 2)), 4 * (attempt + 1)
            return drafts[0] / drafts[1] if name == "spec_accept_rate" else (base + total) / (attempt + 1)
        case "rows":
            whole = [row(one, at) for one in range(attempt) for at in range(2)]
            own = value(name, attempt, total, dialect if stream else "cumulative")
            return own if stream and dialect == "incremental" else whole + own
        case "spans":
            spans = [{"version": f"v{one}", "start": 2 * one, "end": 2 * one + 2} for one in range(attempt + 1)]
            return spans if last else ...
        case "measured":
            latency = {
                "e2e_latency": now,
                "first_token_latency": 1.0,
                "decode_throughput": (base + total - 1) / (now - 1),
            }
            # Those that are times of day: by as much earlier as the attempt began after the first.
            return latency.get(name, 1000.0)
        case "sent":
            return ... if stream else 1000.0 + now - 1.0
        case _:
            return {"of": attempt}


def check(name: str, attempt: int, meta: dict[str, Any], total: int, dialect: str, stream: bool, last: bool) -> None:
    want = expected(name, attempt, total, dialect, stream, last)
    found = meta.get(name, ...)
    assert found == (pytest.approx(want) if isinstance(want, float) else want), (dialect, attempt, total)


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
@pytest.mark.parametrize("name", [name for name in fields.META_INFO if KIND[name] != "uncontinued"])
def test_meta_info_field(name: str, stream: bool) -> None:
    """In every dialect, with one to three cuts: in each event after a cut, or in the whole answer."""
    for dialect in DIALECTS:
        for cuts in (1, 2, 3):
            params = b'{"max_new_tokens":%d}' % (2 * (cuts + 1))
            exchange = opened(body_of({"stream": b"true" if stream else b"false", "sampling_params": params}))
            for attempt in range(cuts + 1):
                exchange.dispatch(STOCK, NAMES[attempt], 10.0 * attempt)
                exchange.head(200, SSE_HEAD)
                for total in (1, 2):
                    last = (attempt, total) == (cuts, 2)
                    out = exchange.feed([said(name, attempt, total, dialect, last)], 10.0 * attempt + total)
                    assert exchange.end is None, exchange.detail
                    if stream and attempt:
                        meta = json.loads(out.removeprefix(b"data: "))["meta_info"]
                        check(name, attempt, meta, total, dialect, stream, last)
                if attempt < cuts:
                    assert exchange.complete(10.0 * attempt + 2) is None
            exchange.feed([DONE], 10.0 * cuts + 2)
            assert exchange.end is End.FINISHED
            if not stream:
                meta = json.loads(exchange.answer(10.0 * cuts + 2).body)["meta_info"]
                check(name, cuts, meta, 2, dialect, stream, last=True)


def continued(reason: dict[str, Any]) -> tuple[SglangExchange, Any]:
    """An answer that was cut after two tokens, and its finish after two more."""
    exchange = opened(body_of({}))
    for name, prompt, end in (("mine", 2, None), ("second", 4, reason)):
        exchange.dispatch(STOCK, name, 0.0)
        exchange.head(200, SSE_HEAD)
        meta = {"id": name, "finish_reason": end, "prompt_tokens": prompt, "completion_tokens": 2}
        out = exchange.feed([sse({"output_ids": [7, 8], "meta_info": meta})], 1.0)
    return exchange, json.loads(out.removeprefix(b"data: "))["meta_info"]["finish_reason"] if out else None


@pytest.mark.parametrize("name", fields.FINISH_REASON)
def test_finish_reason_field(name: str) -> None:
    told: dict[str, Any] = {"type": "stop", "matched": [1, "x"], "length": 2, "message": "m", "err_type": "e", "new": 1}
    assert continued(told)[1] == {**told, "length": 4}
    if name == "status_code":
        asked = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        exchange, seen = continued(asked)
        assert (seen, exchange.end) == (asked, None)
        exchange.feed([DONE], 1.0)
        assert exchange.end is End.ABORTED
        exchange, seen = continued({**asked, "status_code": 500})
        assert (seen, exchange.end) == (None, End.FAILED)
    else:
        assert name in told


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
@pytest.mark.parametrize("name", BECOMES["uncontinued"])
def test_uncontinued_field(name: str, stream: bool) -> None:
    """Whole while nothing happens; after a cut, the request fails by the field's name."""
    exchange = opened(body_of({"stream": b"true" if stream else b"false"}))
    exchange.dispatch(STOCK, "mine", 0.0)
    exchange.head(200, SSE_HEAD)
    event = said(name, 0, 1, "cumulative", last=False)
    assert exchange.feed([event], 1.0) == (event[0] if stream else b"")
    with pytest.raises(CannotComplete, match=name):
        exchange.complete(2.0)
