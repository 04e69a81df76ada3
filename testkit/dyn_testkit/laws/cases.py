"""Hypothesis strategies for cases. They shrink to fewer and earlier faults, whole reads, shorter prompts."""

from __future__ import annotations

import json
import struct
from functools import partial
from typing import Any

from hypothesis import strategies as st

from dyn_testkit import faults
from dyn_testkit.engine import Model, Sampling, generate
from dyn_testkit.faults import What, Where
from dyn_testkit.laws.answers import DIALECTS
from dyn_testkit.laws.observed import Case, Planned
from dyn_testkit.laws.sglang import SGLANG
from dyn_testkit.laws.wire import Wire
from dyn_testkit.simnet import WHOLE, Fragmentation
from dyn_testkit.strategies import dictionaries, fragmentations, requests
from dyn_testkit.worker import Dialect

#: Most tokens that a request asks for.
MAX_TOKENS = 12

#: A small vocabulary, so that stop tokens are often met; room for whatever the strategies ask.
MODEL = Model(vocab_size=40, context_length=4096)

#: The end of a connection.
CUTS: tuple[What, ...] = (faults.CLOSE, faults.RESET)

#: Fields that mean nothing to SGLang or to a router, with values that a careless one would spoil.
STRANGE: dict[str, Any] = {
    "labels_of_mine": {"a": [1, 2.50, None], "ü": "\ud83d\ude00\n"},
    "conversation_id": "c/1",
    "a_future_field": 2**63 - 1,
    "priority": -(2**63),
    "log_metrics": False,
}


def spelled(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[bytes]:
    """Each value as JSON, in one of many ways to write it; shrinks to sorted keys without blanks."""
    separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")])
    return st.builds(_spelled, values, separators, st.integers(0, 15), st.booleans())


def _spelled(value: dict[str, Any], separators: tuple[str, str], turn: int, back: bool) -> bytes:
    names = sorted(value, reverse=back)
    turn %= len(names)
    order = {name: value[name] for name in names[turn:] + names[:turn]}
    return json.dumps(order, separators=separators).encode("utf-8", "surrogatepass")


def bodies(model: Model = MODEL, max_tokens: int = MAX_TOKENS) -> st.SearchStrategy[bytes]:
    """Single token-mode requests that may be continued, spelled in many ways, with fields nobody knows."""
    dressed = st.builds(
        partial(_dressed, model),
        requests(model, max_tokens),
        strange=dictionaries({}, {name: st.just(value) for name, value in STRANGE.items()}),
        stream=st.booleans(),
        most=st.one_of(st.integers(0, max_tokens), st.integers(5, max_tokens)),
        least=st.one_of(st.just(0), st.integers(0, max_tokens)),
        stop_at=st.one_of(st.none(), st.integers(0, max_tokens - 1)),
    )
    return spelled(dressed)


def _dressed(
    model: Model,
    body: dict[str, Any],
    *,
    strange: dict[str, Any],
    stream: bool,
    most: int,
    least: int,
    stop_at: int | None,
) -> dict[str, Any]:
    """A request with fields nobody knows, budgets, and a stop token that the engine will come to (`stop_at`)."""
    sampling = {**body["sampling_params"], "max_new_tokens": most}
    if least:
        sampling["min_new_tokens"] = min(least, most)
    if stop_at is not None:
        steps = list(generate(model, body["input_ids"], Sampling.parse({**sampling, "ignore_eos": True})))
        sampling["stop_token_ids"] = [step.token for step in steps[stop_at : stop_at + 1]]
    return {**body, "stream": stream, "sampling_params": sampling, **strange}


def carriable(bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """The same requests without what gRPC cannot carry, and with numbers that it does not round."""
    return bodies.map(_carriable)


def _carriable(body: bytes) -> bytes:
    value = json.loads(body)
    left_out = {*STRANGE, "token_ids_logprob"}
    sampling = {
        name: struct.unpack("<f", struct.pack("<f", item))[0] if isinstance(item, float) else item
        for name, item in value["sampling_params"].items()
        if name != "logit_bias"
    }
    kept = {name: item for name, item in value.items() if name not in left_out}
    return json.dumps({**kept, "sampling_params": sampling}).encode()


def spots(max_tokens: int = MAX_TOKENS) -> st.SearchStrategy[Where]:
    """Every place of an answer in which a connection can end; the rare ones as often as the others."""
    soon, token = st.integers(1, 3), st.integers(0, max_tokens)
    late = (faults.AFTER_LAST_TOKEN, faults.AFTER_FINISH, faults.BEFORE_LAST_CHUNK, faults.AFTER_DONE)
    return st.one_of(
        st.just(faults.AT_HEAD),
        st.builds(faults.at_token, soon),
        st.builds(faults.at_token, token),
        st.builds(faults.inside_chunk_size, soon),
        st.builds(faults.inside_json, soon, st.integers(0, 400)),
        *map(st.just, late),
    )


def plans(
    whats: tuple[What, ...] = CUTS, most: int = 3, where: st.SearchStrategy[Where] | None = None
) -> st.SearchStrategy[tuple[Planned, ...]]:
    """What happens to the first attempts of a request; the next one lives."""
    fault = st.tuples(spots() if where is None else where, st.sampled_from(whats))
    return st.sampled_from(range(most + 1)).flatmap(lambda count: st.tuples(*[fault] * count))


def dialects(most: int = 4) -> st.SearchStrategy[tuple[Dialect, ...]]:
    """How the workers of the attempts stream."""
    return st.integers(1, most).flatmap(lambda count: st.tuples(*[st.sampled_from(DIALECTS)] * count))


def cases(
    body: st.SearchStrategy[bytes] | None = None,
    plan: st.SearchStrategy[tuple[Planned, ...]] | None = None,
    fragmentation: st.SearchStrategy[Fragmentation] | None = None,
    wire: Wire = SGLANG,
) -> st.SearchStrategy[Case]:
    """Requests under faults."""
    return st.builds(
        Case,
        bodies() if body is None else body,
        plans() if plan is None else plan,
        dialects(),
        fragmentations() if fragmentation is None else fragmentation,
        st.booleans(),
        wire=st.just(wire),
    )


#: Where the legs of a pair are on their way to a token, and where they are before it.
PHASES: tuple[Where, ...] = (faults.AT_HEAD, faults.AT_BOOTSTRAP, faults.IN_TRANSFER, faults.AFTER_TRANSFER)


def pairs(
    body: st.SearchStrategy[bytes] | None = None, whats: tuple[What, ...] = (*CUTS, faults.KILL_WORKER)
) -> st.SearchStrategy[Case]:
    """Requests to prefill/decode pairs, either leg of which ends in any phase, or none; each attempt has its own."""
    phase = st.sampled_from(PHASES)
    nothing = st.just((faults.AFTER_DONE, faults.CLOSE))
    prefill = st.one_of(phase, st.builds(faults.at_token, st.integers(0, 1)), st.just(faults.AFTER_FINISH))
    decode = st.one_of(phase, spots())
    struck = st.sampled_from(whats)

    def case(
        body: bytes, faulty: list[tuple[Planned, Planned]], spoken: tuple[Dialect, ...], how: Fragmentation, late: int
    ) -> Case:
        decodes, prefills = tuple(one for one, _ in faulty), tuple(other for _, other in faulty)
        return Case(body, decodes, spoken, how, prefills=prefills, late=late)

    attempt = st.one_of(
        st.tuples(st.tuples(decode, struck), nothing),
        st.tuples(nothing, st.tuples(prefill, struck)),
        st.tuples(st.tuples(decode, struck), st.tuples(prefill, struck)),
    )
    return st.builds(
        case,
        bodies() if body is None else body,
        st.lists(attempt, max_size=3),
        dialects(),
        fragmentations(),
        st.integers(0, 12),
    )


def hard(model: Model = MODEL, wire: Wire = SGLANG) -> list[Case]:
    """The hard cases, one by one: what every run should begin with."""
    sampling: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0}
    request = {
        "rid": "a",
        "input_ids": [1, 2, 3],
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    fourth = list(generate(model, [1, 2, 3], Sampling.parse(sampling)))[3].token
    stopping = {**sampling, "max_new_tokens": 50, "stop_token_ids": [fourth]}
    one_place = (
        faults.AT_HEAD,
        faults.at_token(0),
        faults.at_token(3),
        faults.inside_chunk_size(2),
        faults.inside_json(2, 40),
        faults.AFTER_LAST_TOKEN,
        faults.AFTER_FINISH,
        faults.BEFORE_LAST_CHUNK,
        faults.AFTER_DONE,
    )
    planned: list[tuple[dict[str, Any], tuple[Planned, ...], Fragmentation]] = [
        ({}, (), WHOLE),
        *(({}, ((where, faults.CLOSE),), WHOLE) for where in one_place),
        ({}, ((faults.at_token(2), faults.CLOSE),) * 3, Fragmentation(1)),
        ({"sampling_params": stopping}, ((faults.AFTER_LAST_TOKEN, faults.CLOSE),), WHOLE),
        ({"sampling_params": {**sampling, "max_new_tokens": 0}}, ((faults.AT_HEAD, faults.CLOSE),), WHOLE),
    ]
    return [
        Case(json.dumps({**request, **fields, "stream": stream}).encode(), plan, spoken, how, wire=wire)
        for fields, plan, how in planned
        for stream in (True, False)
        for spoken in (DIALECTS, DIALECTS[::-1])
    ]


def hard_pairs() -> list[Case]:
    """As `hard`, of requests to prefill/decode pairs."""
    nothing: Planned = (faults.AFTER_DONE, faults.CLOSE)
    twice: tuple[Planned, ...] = ((faults.at_token(2), faults.CLOSE),) * 2
    planned: list[tuple[tuple[Planned, ...], tuple[Planned, ...], Fragmentation]] = [
        ((), (), WHOLE),
        (twice, (), WHOLE),
        (twice, (), Fragmentation(1)),
        *((((where, faults.KILL_WORKER),), (), WHOLE) for where in PHASES),
        *(((nothing,), ((where, faults.KILL_WORKER),), WHOLE) for where in (*PHASES, faults.AFTER_FINISH)),
    ]
    request = {
        "rid": "a",
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 9, "temperature": 0, "stream_interval": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return [
        Case(json.dumps({**request, "stream": stream}).encode(), decodes, spoken, how, prefills=prefills)
        for decodes, prefills, how in planned
        for stream in (True, False)
        for spoken in (DIALECTS, DIALECTS[::-1])
    ]


def hopeless(limit: int = 3) -> st.SearchStrategy[tuple[Planned, ...]]:
    """Faults on every attempt that a router may make, before the answer is out."""
    early = st.one_of(
        st.just(faults.AT_HEAD),
        st.builds(faults.at_token, st.integers(0, 3)),
        st.builds(faults.inside_chunk_size, st.integers(1, 3)),
    )
    return st.tuples(*[st.tuples(early, st.sampled_from(CUTS))] * (limit + 1))


#: (fields that forbid a continuation, the reason that must be named). `sampling_params` are merged into the request's.
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
    ({"sampling_params": {"presence_penalty": -0.25}}, "presence_penalty"),
    ({"sampling_params": {"repetition_penalty": 1.1}}, "repetition_penalty"),
    ({"sampling_params": {"json_schema": "{}"}}, "json_schema"),
    ({"sampling_params": {"regex": "a+"}}, "regex"),
    ({"sampling_params": {"ebnf": "root ::= 'a'"}}, "ebnf"),
    ({"sampling_params": {"structural_tag": "{}"}}, "structural_tag"),
    ({"sampling_params": {"n": 2}}, "n"),
    ({"sampling_params": {"stop_regex": "a+"}}, "stop_regex"),
    ({"sampling_params": {"beam_width": 2}}, "beam_width"),
    ({"sampling_params": {"choice": ["a", "b"]}}, "choice"),
    ({"sampling_params": {"stop": ["x" * 300]}}, "stop"),
    ({"sampling_params": {"custom_params": {"thinking_budget": 3}}}, "custom_params"),
    ({"input_ids": [[1, 2], [3]]}, "batch"),
    ({"input_embeds": [[0.5]]}, "input_embeds"),
    ({"session_params": {"id": "s"}}, "session_params"),
    ({"custom_logit_processor": "code"}, "custom_logit_processor"),
    ({"image_data": "http://x/y.png"}, "image_data"),
    ({"video_data": ["v"]}, "video_data"),
    ({"audio_data": ["a"]}, "audio_data"),
    ({"require_reasoning": True}, "require_reasoning"),
    ({"max_thinking_tokens": 5}, "max_thinking_tokens"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"bootstrap_host": "10.0.0.1"}, "bootstrap_host"),
    ({"bootstrap_port": 8998}, "bootstrap_port"),
    ({"bootstrap_room": 2**63 - 1}, "bootstrap_room"),
    ({"disagg_prefill_dp_rank": 0}, "disagg_prefill_dp_rank"),
)
#: Fields that look the same but forbid nothing.
NEUTRAL: tuple[dict[str, Any], ...] = (
    {},
    {"sampling_params": {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0}},
    {"sampling_params": {"json_schema": None, "regex": "", "stop": [], "n": 1}},
    {"session_params": None, "image_data": None, "require_reasoning": False, "custom_logit_processor": None},
)


def judged_bodies(model: Model = MODEL, max_tokens: int = MAX_TOKENS) -> st.SearchStrategy[tuple[bytes, str]]:
    """Bodies with what an admission must say of them: the field that forbids a continuation, or ""."""
    extras = st.one_of(st.sampled_from(REFUSED), st.sampled_from(NEUTRAL).map(lambda fields: (fields, "")))
    return st.builds(judged, requests(model, max_tokens), extras, st.booleans())


def judged(body: dict[str, Any], extra: tuple[dict[str, Any], str], stream: bool) -> tuple[bytes, str]:
    """A request with the fields of `extra` (of `REFUSED`, say), and what an admission must say of it."""
    fields, reason = extra
    sampling = {**body["sampling_params"], **fields.get("sampling_params", {})}
    return json.dumps({**body, **fields, "stream": stream, "sampling_params": sampling}).encode(), reason
