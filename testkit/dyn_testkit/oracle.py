"""What a whole logical request must come to, computed from the engine model alone.

No code is shared with the mock worker's answers or with any proxy: it is the second opinion. The value is what a stock
unary answer would be, without the fields that are measured.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dyn_testkit import engine
from dyn_testkit.detokenizer import UNARY_INTERVAL, Detokenizer
from dyn_testkit.engine import Model, Sampling
from dyn_testkit.stops import StopStrings
from dyn_testkit.tokenizer import PLAIN, Tokenizer

#: Keys of `meta_info` that depend on time, place or cache rather than on the request.
MEASURED = frozenset(
    {
        "cached_tokens",
        "cached_tokens_details",
        "dp_rank",
        "e2e_latency",
        "num_retractions",
        "response_sent_to_client_ts",
    }
)
#: Lists of `meta_info` with one entry an output token: deltas in an incremental stream.
PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows one kind of worker: the model and the flags that show in answers."""

    model: Model
    weight_version: str = "default"
    #: None: answers carry no text.
    tokenizer: Tokenizer | None = None
    defaults: Mapping[str, Any] | None = None
    routed_experts: bool = False
    indexer_topk: bool = False
    expert_mark: int = 0
    tokens_per_tick: int = 1

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer to a single, valid request, with ids or with a text."""
        prompt = self.prompt(body)
        sampling = Sampling.parse(body.get("sampling_params") or {}, self.defaults)
        tokenizer = self.tokenizer or PLAIN
        adapter = body.get("lora_path") or ""
        steps = list(engine.generate(self.model, prompt, sampling, adapter, tokenizer, self.tokens_per_tick))
        ids = [step.token for step in steps]
        finish = steps[-1].finish if steps else {"type": "length", "length": 0}
        meta: dict[str, Any] = {
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "weight_version": self.weight_version,
            "reasoning_tokens": 0,
            "completion_tokens": len(ids),
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
        }
        if "rid" in body:
            meta["id"] = body["rid"]
        if body.get("return_logprob"):
            meta |= self._logprobs(body, prompt, steps)
        if self.routed_experts and body.get("return_routed_experts"):
            start = body.get("routed_experts_start_len", 0)
            meta["routed_experts"] = self._rows([*prompt, *ids], start, engine.expert_row)
        if self.indexer_topk and body.get("return_indexer_topk"):
            meta["indexer_topk"] = self._rows([*prompt, *ids], 0, engine.indexer_row)
        value: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
        if self.tokenizer is not None:
            value["text"] = self._text(prompt, ids, finish, sampling, bool(body.get("stream")))
        if body.get("return_prompt_token_ids"):
            value["prompt_token_ids"] = prompt
        return value

    def prompt(self, body: Mapping[str, Any]) -> list[int]:
        """The ids of its prompt."""
        if body.get("input_ids") is not None:
            return list(body["input_ids"])
        tokenizer = self.tokenizer or PLAIN
        return [*tokenizer.prefix, *tokenizer.encode(body["text"])]

    def _logprobs(self, body: Mapping[str, Any], prompt: list[int], steps: list[engine.Step]) -> dict[str, Any]:
        start = body.get("logprob_start_len")
        start = len(prompt) if start in (None, -1) else max(0, start)
        views = [
            engine.outlook(self.model, engine.absorb(engine.EMPTY, prompt[:at])) for at in range(start, len(prompt))
        ]
        scored = list(zip(views, prompt[start:], strict=True))
        speller = self.tokenizer if body.get("return_text_in_logprobs") else None

        def entry(view: engine.Outlook | None, token: int) -> list[Any]:
            score = None if view is None else engine.logprob(self.model, view, token)
            return [score, token, None if speller is None else speller.decode([token])]

        def rows(find: Any) -> tuple[list[Any], list[Any]]:
            inputs = [None if not at else [entry(view, token) for token in find(view)] for at, view in enumerate(views)]
            return inputs, [[entry(step.view, token) for token in find(step.view)] for step in steps]

        keys: dict[str, Any] = {
            "input_token_logprobs": [entry(view if at else None, token) for at, (view, token) in enumerate(scored)],
            "output_token_logprobs": [entry(step.view, step.token) for step in steps],
            "output_token_logprobs_length": len(steps),
        }
        best, chosen = body.get("top_logprobs_num") or 0, body.get("token_ids_logprob")
        if best:
            found = rows(lambda view: [engine.token_at(self.model, view, rank) for rank in range(best)])
            keys["input_top_logprobs"], keys["output_top_logprobs"] = found
        if chosen:
            keys["input_token_ids_logprobs"], keys["output_token_ids_logprobs"] = rows(lambda view: chosen)
        return keys

    def _rows(self, sequence: list[int], start: int, row: Callable[[Model, int], list[int]]) -> str:
        numbers: list[int] = []
        for end in range(start + 1, len(sequence)):
            found = row(self.model, engine.absorb(engine.EMPTY, sequence[:end]))
            numbers += [self.expert_mark + number for number in found]
        return base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()

    def _text(
        self, prompt: Sequence[int], ids: Sequence[int], finish: dict[str, Any] | None, sampling: Sampling, stream: bool
    ) -> str:
        """The texts that a detokenizer tells, one after the other; where they end depends on the kind of request."""
        tokenizer = self.tokenizer or PLAIN
        detokenizer = Detokenizer(tokenizer, prompt, sampling)
        stops = StopStrings(sampling.stop, tokenizer)
        interval = sampling.stream_interval or 1
        text, told = "", 0
        for count in range(self.tokens_per_tick, len(ids), self.tokens_per_tick):
            due = count - told >= interval or not told if stream else count % UNARY_INTERVAL == 0
            if due and not (stream and stops.begun(ids[:count])):
                text += detokenizer.push(ids[told:count])
                told = count
        return text + detokenizer.push(ids[told:], finish)


def differences(answer: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Where an answer is not what it must be, in words; measured fields and a rid that nobody chose do not count."""
    found = [f"{name}: missing or extra" for name in sorted(set(answer) ^ set(wanted))]
    got_meta, want_meta = dict(answer.get("meta_info", {})), dict(wanted["meta_info"])
    if "id" not in want_meta:
        got_meta.pop("id", None)
    compared = {name: answer.get(name) for name in wanted if name != "meta_info"} | {
        f"meta_info.{name}": value for name, value in got_meta.items() if name not in MEASURED
    }
    expected = {name: value for name, value in wanted.items() if name != "meta_info"} | {
        f"meta_info.{name}": value for name, value in want_meta.items()
    }
    for name in sorted(set(compared) | set(expected)):
        if name not in compared or name not in expected:
            found.append(f"{name}: {'missing' if name in expected else 'extra'}")
        elif compared[name] != expected[name]:
            found.append(f"{name}: got {compared[name]!r}, want {expected[name]!r}")
    return found


def fold(events: Sequence[Mapping[str, Any]], dialect: str) -> dict[str, Any]:
    """The unary answer that a stream's events add up to; `dialect` is the worker's.

    Raises `ValueError` if there is no event, or events disagree about how many tokens there are.
    """
    if not events:
        raise ValueError("no events")
    value = {name: item for name, item in events[-1].items() if name != "index"}
    meta = dict(value["meta_info"])
    value["meta_info"] = meta
    if dialect != "cumulative":
        value["output_ids"] = [token for event in events for token in event["output_ids"]]
        if "text" in value:
            value["text"] = "".join(event["text"] for event in events)
    if dialect == "incremental":
        for name in PER_TOKEN:
            if name in meta:
                meta[name] = [entry for event in events for entry in event["meta_info"][name]]
    if len(value["output_ids"]) != meta["completion_tokens"]:
        raise ValueError(f"{len(value['output_ids'])} ids, but completion_tokens is {meta['completion_tokens']}")
    return value
