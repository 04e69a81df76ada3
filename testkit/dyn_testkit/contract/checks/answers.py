"""What an answer says, the worker compared with itself."""

from __future__ import annotations

import random
from typing import Any

from dyn_testkit.contract.compare import differences
from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import Inapplicable, check, equal, expect, number

_ALWAYS = (
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "cached_tokens_details",
    "dp_rank",
)
_FINISHED = ("weight_versions", "e2e_latency")
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "num_retractions")
#: Where cached tokens are kept.
_TIERS = ("device", "host", "storage")
#: Tokens of a prompt that nobody has sent before.
_FRESH = 32
#: Cuts of an answer of this many tokens.
_TOKENS = 12
_CUTS = (1, 6, _TOKENS - 1)


def _lacks(value: dict[str, Any], keys: tuple[str, ...]) -> str:
    return ", ".join(key for key in keys if key not in value)


@check("§4.1, tokenizer_manager.py:2675")
async def unary_keys(worker: Subject) -> None:
    """A unary answer is an object with `output_ids` and `meta_info`, and `text` if and only if there is a tokenizer."""
    value = await worker.unary(worker.body(3))
    lacking = _lacks(value, ("output_ids", "meta_info"))
    expect(not lacking, f"the answer lacks {lacking}")
    if worker.facts.tokenizer is not None:
        equal("it has `text`", "text" in value, worker.facts.tokenizer)
    expect(all(type(token) is int for token in value["output_ids"]), "output_ids are not integers")


@check("§4.4, tokenizer_manager.py:2506")
async def meta_keys(worker: Subject) -> None:
    """`meta_info` has its ten keys in every event; `weight_versions` and `e2e_latency` only in the last one."""
    unary = (await worker.unary(worker.body(3)))["meta_info"]
    *running, last = [event["meta_info"] for event in await worker.events(worker.body(5))]
    for where, meta in (("the unary answer", unary), ("the last event", last)):
        expect(not _lacks(meta, _ALWAYS + _FINISHED), f"{where} lacks {_lacks(meta, _ALWAYS + _FINISHED)}")
    for meta in running:
        expect(not _lacks(meta, _ALWAYS), f"an event lacks {_lacks(meta, _ALWAYS)}")
        early = [key for key in _FINISHED if key in meta]
        expect(not early, f"{', '.join(early)} before the finish")


@check("§4.4, tokenizer_manager.py:2506")
async def counters(worker: Subject) -> None:
    """`prompt_tokens` and `completion_tokens` count; `cached_tokens` is less than the prompt."""
    for stream in (False, True):
        value = await worker.answer(worker.body(7), stream=stream)
        meta = value["meta_info"]
        equal("prompt_tokens", meta["prompt_tokens"], len(worker.prompt))
        equal("completion_tokens", meta["completion_tokens"], len(value["output_ids"]))
        equal("output_ids, counted", len(value["output_ids"]), 7)
        expect(0 <= meta["cached_tokens"] < len(worker.prompt), f"cached_tokens is {meta['cached_tokens']}")
        expect(meta["num_retractions"] >= 0, f"num_retractions is {meta['num_retractions']}")
        expect(meta["reasoning_tokens"] == 0, f"reasoning_tokens is {meta['reasoning_tokens']}, none was asked for")


@check("§4.4")
async def types(worker: Subject) -> None:
    """Counters are integers in every event, `e2e_latency` a number of seconds, `dp_rank` an integer or null."""
    unary = (await worker.unary(worker.body(3)))["meta_info"]
    metas = [unary, *(event["meta_info"] for event in await worker.events(worker.body(3)))]
    for meta in metas:
        wrong = [f"{name} {meta[name]!r}" for name in _COUNTS if type(meta[name]) is not int]
        expect(not wrong, f"no integers: {', '.join(wrong)}")
        expect(meta["dp_rank"] is None or type(meta["dp_rank"]) is int, f"dp_rank is {meta['dp_rank']!r}")
    for meta in (unary, metas[-1]):
        seconds = meta["e2e_latency"]
        expect(number(seconds) and seconds >= 0, f"e2e_latency is {seconds!r}")


@check("§4.4, output_streamer.py:102")
async def cached_tokens(worker: Subject) -> None:
    """`cached_tokens` is the same in every event, and what its details add up to; they are null for 0."""
    first = await worker.unary(worker.body(1))
    events = await worker.events(worker.body(6))
    equal("cached_tokens, event by event", len({event["meta_info"]["cached_tokens"] for event in events}), 1)
    for value in (first, *events):
        count, details = value["meta_info"]["cached_tokens"], value["meta_info"]["cached_tokens_details"]
        expect(details is None or isinstance(details, dict), f"cached_tokens_details is {details!r}")
        equal(f"the sum of {details}", sum((details or {}).get(tier, 0) for tier in _TIERS), count)


@check("§4.4, schedule_batch.py:2965")
async def new_prompts_are_not_cached(worker: Subject) -> None:
    """`cached_tokens` of a prompt that nobody has sent before counts no more than its beginning."""
    if len(set(worker.prompt)) < 3:
        raise Inapplicable("prompt= has too few different tokens to make a new prompt of")
    prompt = random.SystemRandom().choices(worker.prompt, k=_FRESH)
    count = (await worker.unary(worker.body(1, input_ids=prompt)))["meta_info"]["cached_tokens"]
    expect(count <= _FRESH // 2, f"{count} of {_FRESH} tokens of a new prompt")


@check("§1.1, §4.4, http_server.py:824")
async def weight_version_is_the_servers(worker: Subject) -> None:
    """`weight_version` of an answer, and of its spans, is that of `/model_info`."""
    wanted = (await worker.ask("/model_info")).response.json()["weight_version"]
    for stream in (False, True):
        meta = (await worker.answer(worker.body(2), stream=stream))["meta_info"]
        equal("weight_version", meta["weight_version"], wanted)
        equal("versions of the spans", [span["version"] for span in meta["weight_versions"]], [wanted])


@check("§3.3, sampler.py:934")
async def sampling_seed(worker: Subject) -> None:
    """With deterministic inference a `sampling_seed` gives the same tokens again, and in a continuation the rest."""
    if not worker.facts.says("enable_deterministic_inference"):
        raise Inapplicable("without enable_deterministic_inference a sampling_seed means nothing")
    sampling = {"temperature": 1.0, "sampling_seed": 7}
    whole = await worker.ids(worker.body(_TOKENS, sampling=sampling))
    equal("output_ids, asked again", await worker.ids(worker.body(_TOKENS, sampling=sampling)), whole)
    cut = _TOKENS // 2
    prompt = [*worker.prompt, *whole[:cut]]
    rest = await worker.ids(worker.body(_TOKENS - cut, input_ids=prompt, sampling=sampling))
    equal(f"the rest after {cut} tokens", rest, whole[cut:])


@check("§4.4, srt/utils/weight_versions.py")
async def weight_versions_tile(worker: Subject) -> None:
    """`weight_versions` tiles the output tokens without gaps; its last one is `weight_version`."""
    for count in (1, 6):
        for stream in (False, True):
            meta = (await worker.answer(worker.body(count), stream=stream))["meta_info"]
            spans = meta["weight_versions"]
            edges = [(span["start"], span["end"]) for span in spans]
            ends = [0, *(end for _, end in edges)]
            equal("starts of the spans", [start for start, _ in edges], ends[:-1])
            equal("the last end", ends[-1], count)
            equal("version of the last span", spans[-1]["version"], meta["weight_version"])
            expect(set(spans[-1]) == {"version", "start", "end"}, f"keys of a span: {sorted(spans[-1])}")


@check("§3, sampling_params.py:236")
async def same_twice(worker: Subject) -> None:
    """At temperature 0 the same request has the same tokens again."""
    first = await worker.ids(worker.body(_TOKENS))
    equal("output_ids, asked again", await worker.ids(worker.body(_TOKENS)), first)


@check("§4.1, §4.3")
async def unary_is_the_fold(worker: Subject) -> None:
    """A unary answer is what the events of the same request's stream add up to."""
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    for body in (worker.body(9), worker.body(9) | logprobs):
        streamed = await worker.answer(body, stream=True)
        unary = await worker.answer(body, stream=False)
        found = differences(unary, streamed, worker.tolerance)
        expect(not found, "unary and fold of the stream differ: " + "; ".join(found))


@check("§3.3")
async def continuation(worker: Subject) -> None:
    """Prompt and delivered tokens as the new prompt give the rest of the answer, at every cut."""
    whole = await worker.ids(worker.body(_TOKENS))
    for cut in _CUTS:
        prompt = [*worker.prompt, *whole[:cut]]
        rest = await worker.ids(worker.body(_TOKENS - cut, input_ids=prompt))
        equal(f"the rest after {cut} tokens", rest, whole[cut:])


@check("§3.3, §4.10")
async def continuation_streams(worker: Subject) -> None:
    """A continued stream has the rest of tokens, logprobs and counters, as if it were a request of its own."""
    body = worker.body(_TOKENS, return_logprob=True)
    whole = await worker.answer(body, stream=True)
    cut = _TOKENS // 2
    prompt = [*worker.prompt, *whole["output_ids"][:cut]]
    rest = await worker.answer(worker.body(_TOKENS - cut, input_ids=prompt, return_logprob=True), stream=True)
    equal("prompt_tokens", rest["meta_info"]["prompt_tokens"], len(prompt))
    equal("finish_reason", rest["meta_info"]["finish_reason"], {"type": "length", "length": _TOKENS - cut})
    equal("the rest", rest["output_ids"], whole["output_ids"][cut:])
    name = "output_token_logprobs"
    found = differences({name: rest["meta_info"][name]}, {name: whole["meta_info"][name][cut:]}, worker.tolerance)
    expect(not found, "; ".join(found))


@check("§2, tokenizer_manager.py:2673")
async def prompt_token_ids(worker: Subject) -> None:
    """`return_prompt_token_ids` adds the prompt to a unary answer and to every event."""
    body = worker.body(4, return_prompt_token_ids=True)
    for value in (await worker.unary(body), *(await worker.events(body))):
        equal("prompt_token_ids", value.get("prompt_token_ids"), list(worker.prompt))


@check("§1.4, api_types.py:1413")
async def unknown_field_is_ignored(worker: Subject) -> None:
    """An unknown key beside `sampling_params` is ignored."""
    wanted = await worker.ids(worker.body(3))
    equal("output_ids", await worker.ids(worker.body(3, wibble={"a": [1]})), wanted)


@check("§2")
async def null_is_the_default(worker: Subject) -> None:
    """`null` for a nullable field is its default."""
    nothing = dict.fromkeys(("rid", "text", "return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path"))
    value = await worker.unary(worker.body(3, **nothing))
    equal("output_ids", value["output_ids"], await worker.ids(worker.body(3)))
    expect(isinstance(value["meta_info"]["id"], str), "no rid was made")


@check("§2, io_struct.py:481")
async def batch(worker: Subject) -> None:
    """A list of prompts is answered by a list in the same order, each as if it were alone."""
    other = [*worker.prompt[1:], worker.prompt[0]]
    if list(worker.prompt) == other:
        raise Inapplicable("prompt= is the same whichever token is first")
    values = await worker.unary(worker.body(4, input_ids=[list(worker.prompt), other]))
    expect(isinstance(values, list) and len(values) == 2, "the answer is no list of two")
    equal("prompt_tokens", [value["meta_info"]["prompt_tokens"] for value in values], [len(other)] * 2)
    alone = [await worker.ids(worker.body(4)), await worker.ids(worker.body(4, input_ids=other))]
    equal("output_ids", [value["output_ids"] for value in values], alone)


@check("§2, tokenizer_manager.py:2188")
async def batch_stream(worker: Subject) -> None:
    """Events of a batch carry `index`; those of one index add up to that prompt's answer."""
    other = [*worker.prompt, worker.prompt[0]]
    events = await worker.events(worker.body(4, input_ids=[list(worker.prompt), other]))
    expect(all(event.get("index") in (0, 1) for event in events), "an event has no `index`, or a wrong one")
    for index, prompt in enumerate((list(worker.prompt), other)):
        value = worker.folded([event for event in events if event["index"] == index])
        equal(f"tokens of index {index}", value["output_ids"], await worker.ids(worker.body(4, input_ids=prompt)))


@check("§2, tokenizer_manager.py:2163")
async def samples(worker: Subject) -> None:
    """`n` samples are a list of `n` answers with rids of their own."""
    values = await worker.unary(worker.body(3, sampling={"n": 2}, rid=worker.rid()))
    expect(isinstance(values, list) and len(values) == 2, "the answer is no list of two")
    equal("samples at temperature 0", values[0]["output_ids"], values[1]["output_ids"])
    expect(values[0]["meta_info"]["id"] != values[1]["meta_info"]["id"], "both samples have one id")
