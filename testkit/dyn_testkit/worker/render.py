"""How an answer looks: the JSON values of events and unary answers, keys in the order of the recorded ones."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from dyn_testkit.detokenizer import Detokenizer
from dyn_testkit.engine import EMPTY, Model, Outlook, Step, absorb, expert_row, indexer_row, logprob, mix, outlook, top
from dyn_testkit.worker.jobs import Job
from dyn_testkit.worker.options import WorkerOptions, in_base64

#: `[logprob or null, token, text or null]`
Entry = list[Any]
INPUTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
#: Folded into the histories of rows that a decode worker has never computed.
_STALE = 19


@dataclass(slots=True)
class Live:
    """One generation in progress."""

    job: Job
    started: float
    #: None: no tokenizer.
    detokenizer: Detokenizer | None = None
    cached: int = 0
    retractions: int = 0
    ids: list[int] = field(default_factory=list)
    token_logprobs: list[Entry] = field(default_factory=list)
    top_logprobs: list[list[Entry]] = field(default_factory=list)
    ids_logprobs: list[list[Entry] | None] = field(default_factory=list)
    #: `[version, start, end]` in output tokens.
    versions: list[list[Any]] = field(default_factory=list)
    #: The prompt's `input_*` keys, once computed.
    inputs: dict[str, Any] = field(default_factory=dict)
    #: Tokens that are already in events.
    emitted: int = 0
    #: What the detokenizer told of the first so many tokens.
    text: str = ""
    told: int = 0
    #: Set when somebody aborts it.
    abort: dict[str, Any] | None = None
    #: The first token's logprob as another worker told it; None: it is computed here.
    told_logprob: float | None = None

    def add(self, model: Model, step: Step, version: str) -> None:
        """Take the engine's next token."""
        self.ids.append(step.token)
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append([version, len(self.ids) - 1, len(self.ids)])
        self.versions[-1][2] = len(self.ids)
        job = self.job
        if job.return_logprob:
            told = self.told_logprob if len(self.ids) == 1 else None
            value = logprob(model, step.view, step.token) if told is None else told
            self.token_logprobs.append(_entry(job, value, step.token))
            if job.top_logprobs_num:
                self.top_logprobs.append(_top(job, model, step.view))
            if job.token_ids_logprob:
                # A decode worker is told the first token's logprob and top logprobs, not these (decode.py:2757).
                self.ids_logprobs.append(_chosen(job, model, step.view) if told is None else None)

    def tell(self, finish: dict[str, Any] | None) -> str:
        """More text: all tokens so far are given to the detokenizer; "" without one."""
        if self.detokenizer is None:
            return ""
        more = self.detokenizer.push(self.ids[self.told :], finish)
        self.told = len(self.ids)
        self.text += more
        return more


def _entry(job: Job, value: float | None, token: int) -> Entry:
    return [value, token, None if job.speller is None else job.speller.decode([token])]


def _top(job: Job, model: Model, view: Outlook) -> list[Entry]:
    return [_entry(job, value, token) for value, token in top(model, view, job.top_logprobs_num)]


def _chosen(job: Job, model: Model, view: Outlook) -> list[Entry]:
    return [_entry(job, logprob(model, view, token), token) for token in job.token_ids_logprob]


def input_logprobs(job: Job, model: Model) -> dict[str, Any]:
    """The `input_*` keys: one entry a prompt token from `logprob_start_len` on, the first one without a value."""
    start = len(job.prompt) if job.logprob_start_len == -1 else max(0, job.logprob_start_len)
    tokens: list[Entry] = []
    tops: list[list[Entry] | None] = []
    chosen: list[list[Entry] | None] = []
    history = absorb(EMPTY, job.prompt[:start])
    for position in range(start, len(job.prompt)):
        token = job.prompt[position]
        view = outlook(model, history)
        first = position == start
        tokens.append(_entry(job, None if first else logprob(model, view, token), token))
        tops.append(None if first else _top(job, model, view))
        chosen.append(None if first else _chosen(job, model, view))
        history = mix(history, token)
    return {"input_token_logprobs": tokens, "input_top_logprobs": tops, "input_token_ids_logprobs": chosen}


def routed_experts(job: Job, ids: list[int], options: WorkerOptions) -> str:
    """int32 rows, little-endian, for positions `[start, prompt + output - 1)`, spelled as the worker does it."""
    rows = _rows(job, ids, options, expert_row, job.routed_experts_start or 0)
    return options.spelling(options.packing(rows))


def indexer_topk(job: Job, ids: list[int], options: WorkerOptions) -> str:
    """The same of the indexer, for all positions, in Base64."""
    return in_base64(_rows(job, ids, options, indexer_row, 0))


def _rows(
    job: Job, ids: list[int], options: WorkerOptions, row: Callable[[Model, int], list[int]], start: int
) -> bytes:
    rows = array("i")
    history = EMPTY
    # A decode worker has never computed the prompt: what is in these rows is from something else.
    stale = len(job.prompt) if options.disaggregation == "decode" else 0
    for position, token in enumerate([*job.prompt, *ids][:-1]):
        history = mix(history, token)
        if position >= start:
            known = history if position >= stale else mix(history, _STALE)
            rows.extend(number + options.expert_mark for number in row(options.model, known))
    return rows.tobytes()


@dataclass(frozen=True, slots=True)
class Renderer:
    """Spells the answers of one worker."""

    options: WorkerOptions

    def wall(self) -> float:
        """Wall-clock time, seconds."""
        return self.options.epoch + trio.current_time()

    def answer(self, live: Live, weight_version: str, finish: dict[str, Any] | None, *, unary: bool) -> dict[str, Any]:
        """A unary answer, or the next event of a stream. Marks all tokens so far as emitted."""
        options, job = self.options, live.job
        deltas = not unary and options.dialect != "cumulative"
        since = live.emitted if deltas else 0
        first = live.emitted == 0
        value: dict[str, Any] = {}
        if not options.skip_tokenizer_init:
            more = live.tell(finish)
            value["text"] = more if deltas else live.text
        value["output_ids"] = live.ids[since:]
        rows_since = since if options.dialect == "incremental" else 0
        value["meta_info"] = self._meta(live, weight_version, finish, rows_since, stamped=unary or first)
        if job.return_prompt_token_ids:
            value["prompt_token_ids"] = job.prompt
        if job.index is not None and not unary:
            value["index"] = job.index
        live.emitted = len(live.ids)
        return value

    def _meta(
        self, live: Live, weight_version: str, finish: dict[str, Any] | None, rows_since: int, *, stamped: bool
    ) -> dict[str, Any]:
        job = live.job
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": finish,
            "prompt_tokens": len(job.prompt),
            "weight_version": live.versions[-1][0] if live.versions else weight_version,
            "num_retractions": live.retractions,
        }
        if job.return_logprob:
            meta |= self._logprobs(live, rows_since)
        meta |= {"reasoning_tokens": 0, "completion_tokens": len(live.ids), "cached_tokens": live.cached}
        if finish is not None:
            spans = live.versions or [[weight_version, 0, 0]]
            meta["weight_versions"] = [{"version": name, "start": start, "end": end} for name, start, end in spans]
        meta["cached_tokens_details"] = {"device": live.cached, "host": 0} if live.cached else None
        if finish is not None or self.options.early_rows:
            if job.routed_experts_start is not None:
                meta["routed_experts"] = routed_experts(job, live.ids, self.options)
            if job.indexer_topk:
                meta["indexer_topk"] = indexer_topk(job, live.ids, self.options)
        meta["dp_rank"] = job.dp_rank
        if finish is not None:
            meta["e2e_latency"] = trio.current_time() - live.started
        if stamped:
            meta["response_sent_to_client_ts"] = self.wall()
        if not self.options.tells_versions:
            meta = {name: value for name, value in meta.items() if name not in ("weight_version", "weight_versions")}
        return meta

    def _logprobs(self, live: Live, since: int) -> dict[str, Any]:
        job = live.job
        if not live.inputs:
            gone = self.options.disaggregation == "decode"  # they stay where the prompt was computed
            live.inputs = {name: [] for name in INPUTS} if gone else input_logprobs(job, self.options.model)
        keys: dict[str, Any] = {
            "input_token_logprobs": live.inputs["input_token_logprobs"],
            "output_token_logprobs": live.token_logprobs[since:],
            "output_token_logprobs_length": len(live.token_logprobs),
        }
        if job.top_logprobs_num:
            keys["input_top_logprobs"] = live.inputs["input_top_logprobs"]
            keys["output_top_logprobs"] = live.top_logprobs[since:]
        if job.token_ids_logprob:
            keys["input_token_ids_logprobs"] = live.inputs["input_token_ids_logprobs"]
            keys["output_token_ids_logprobs"] = live.ids_logprobs[since:]
        return keys

    def refusal(self, job: Job, weight_version: str, finish: dict[str, Any], started: float) -> dict[str, Any]:
        """The event of a request that the scheduler refused; its id 0 is no token."""
        live = Live(job, started, ids=[0], versions=[[weight_version, 0, 1]])
        meta = self._meta(live, weight_version, finish, 0, stamped=True) | {"prompt_tokens": 1}
        for name in INPUTS:
            if name in meta:
                meta[name] = []
        return self._short(live, [0], meta)

    def echo(self, live: Live, weight_version: str, finish: dict[str, Any]) -> dict[str, Any]:
        """The event of a request that was dropped while it waited, perhaps again: always with text, without usage.

        SGLang 0.5.23, `TokenizerManager._handle_abort_req`: whole lists in every dialect, but the last id alone where
        ids are deltas.
        """
        job, spans = live.job, live.versions or [[weight_version, 0, 0]]
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": finish,
            "weight_version": spans[-1][0],
            "e2e_latency": trio.current_time() - live.started,
            "weight_versions": [{"version": name, "start": start, "end": end} for name, start, end in spans],
        }
        if job.return_logprob:
            lists = self._logprobs(live, 0)
            meta |= lists if live.ids else {name: [] for name in lists} | {"output_token_logprobs_length": 0}
        meta["completion_tokens"] = len(live.ids)
        deltas = job.stream and self.options.dialect != "cumulative"
        value: dict[str, Any] = {
            "text": live.text,
            "output_ids": live.ids[-1:] if deltas else live.ids,
            "meta_info": meta,
        }
        if job.return_prompt_token_ids:
            value["prompt_token_ids"] = job.prompt
        if job.index is not None and job.stream:
            value["index"] = job.index
        return value

    def _short(self, live: Live, ids: list[int], meta: dict[str, Any]) -> dict[str, Any]:
        value: dict[str, Any] = {} if self.options.skip_tokenizer_init else {"text": ""}
        value |= {"output_ids": ids, "meta_info": meta}
        if live.job.index is not None:
            value["index"] = live.job.index
        return value
