"""From a body to generations: batches, samples, rids, and the checks of the tokenizer manager and the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dyn_testkit.engine import Sampling
from dyn_testkit.tokenizer import Tokenizer
from dyn_testkit.worker.contract import Aborted, Invalid, Poisoned, Unhandled
from dyn_testkit.worker.options import WorkerOptions

#: The mock's own limit for generations of one body; SGLang's is its memory.
MAX_JOBS = 4096
#: SGLang's limit of stop strings.
_MAX_STOPS = 32
#: Fields that may be lists, one item a prompt, but not together with samples.
_PER_PROMPT = ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob")


@dataclass(frozen=True, slots=True)
class Job:
    """One generation."""

    rid: str
    prompt: tuple[int, ...]
    sampling: Sampling
    #: Position in a batch or among samples; None for a single request.
    index: int | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    #: Spells the tokens in logprobs, if they are to be spelled.
    speller: Tokenizer | None = None
    return_prompt_token_ids: bool = False
    routed_experts_start: int | None = None
    indexer_topk: bool = False
    dp_rank: int | None = None
    adapter: str = ""
    #: Samples of its prompt, this one included.
    copies: int = 1
    #: Where the two legs of a pair meet; the decode leg dials host and port, and may be told the prefill leg's rank.
    bootstrap_room: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    prefill_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns bodies into jobs for one worker."""

    options: WorkerOptions
    #: Makes a rid for requests that name none.
    new_rid: Callable[[], str]
    #: Picks a DP rank for requests that name none.
    next_rank: Callable[[], int | None]
    #: The seed of a request at a worker that ignores seeds.
    next_draw: Callable[[], int]

    def jobs(self, body: Mapping[str, Any]) -> list[Job]:
        """The generations that a body asks for; one with index None for a single request.

        Raises `Invalid`, `Unhandled`.
        """
        prompts, single = self._prompts(body)
        params = body.get("sampling_params") or {}
        copies = _copies(body.get("sampling_params"))
        if isinstance(params, list) and (len(params) < len(prompts) or (single and copies == 1)):
            raise Unhandled("sampling_params: no dictionary for each prompt")
        many = params[: len(prompts)] if isinstance(params, list) else [params] * len(prompts)
        if copies > 1:
            _refuse_lists(body)
        if len(prompts) * copies > MAX_JOBS or any("choice" in item for item in many):
            raise Unhandled("too many generations, or a sampling key without a parameter")
        samplings = [Sampling.parse(item, self.options.preferred_sampling_params) for item in many]
        if not self.options.deterministic:
            samplings = [replace(sampling, sampling_seed=self.next_draw()) for sampling in samplings]
        rids = self._rids(body.get("rid"), len(prompts), single)
        jobs = [
            self._job(body, rid, prompt, sampling, at)
            for at, (rid, prompt, sampling) in enumerate(zip(rids, prompts, samplings, strict=True))
        ]
        for job, item in zip(jobs, many, strict=True):
            self._verify(job, item, body)
        if single and copies == 1:
            return jobs
        if copies > 1:
            jobs = [replace(job, rid=self.new_rid(), copies=copies) for job in jobs for _ in range(copies)]
        return [replace(job, index=index) for index, job in enumerate(jobs)]

    def _prompts(self, body: Mapping[str, Any]) -> tuple[list[list[int]], bool]:
        text: Any = body.get("text")
        ids: Any = body.get("input_ids")
        if body.get("input_embeds") is not None:
            raise Invalid(
                "input_embeds is provided while disable_radix_cache is False. Please add `--disable-radix-cache` when "
                "you launch the server if you want to use input_embeds as inputs."
            )
        if text is None and ids is None:
            raise Invalid("Either text, input_ids or input_embeds should be provided.")
        if ids is not None:
            if not ids:
                raise Invalid("input_ids cannot be empty.")
            return ([ids], True) if isinstance(ids[0], int) else (ids, False)
        if self.options.skip_tokenizer_init:
            raise Invalid(
                "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. Please provide "
                "input_ids or re-initialize the engine with skip_tokenizer_init=False."
            )
        return ([self._ids(text)], True) if isinstance(text, str) else ([self._ids(item) for item in text], False)

    def _ids(self, text: str) -> list[int]:
        tokenizer = self.options.tokenizer
        return [*tokenizer.prefix, *tokenizer.encode(text)]

    def _rids(self, rid: object, count: int, single: bool) -> list[str]:
        if rid is None:
            return [self.new_rid() for _ in range(count)]
        if isinstance(rid, str):
            return [rid] if single else [f"{rid}_{at}" for at in range(count)]
        rids = [str(item) for item in rid] if isinstance(rid, list) else []
        twice = sorted({item for item in rids if rids.count(item) > 1})
        if twice:
            raise Invalid(f"Duplicate request IDs detected within the request: {twice}")
        if len(rids) != count:
            raise Invalid("The specified rids length mismatch with the batch_size for batch processing.")
        return rids

    def _job(self, body: Mapping[str, Any], rid: str, prompt: list[int], sampling: Sampling, at: int) -> Job:
        def of(name: str, default: Any) -> Any:
            value = body.get(name)
            if isinstance(value, list) and (name != "token_ids_logprob" or (value and isinstance(value[0], list))):
                if at >= len(value):
                    raise Unhandled(f"{name}: no item for each prompt")
                value = value[at]
            return default if value is None else value

        options = self.options
        room = of("bootstrap_room", None)
        if room is not None and not isinstance(body["bootstrap_room"], list):
            room += at
        routed = options.routed_experts and of("return_routed_experts", False)
        spelled = of("return_text_in_logprobs", False) and not options.skip_tokenizer_init
        return Job(
            rid=rid,
            prompt=tuple(prompt),
            sampling=sampling,
            stream=of("stream", False),
            return_logprob=of("return_logprob", False),
            logprob_start_len=of("logprob_start_len", -1),
            top_logprobs_num=of("top_logprobs_num", 0),
            token_ids_logprob=tuple(of("token_ids_logprob", ())),
            speller=options.tokenizer if spelled else None,
            return_prompt_token_ids=of("return_prompt_token_ids", False),
            routed_experts_start=of("routed_experts_start_len", 0) if routed else None,
            indexer_topk=options.indexer_topk and of("return_indexer_topk", False),
            dp_rank=self._rank(body, room),
            adapter=of("lora_path", ""),
            bootstrap_room=room,
            bootstrap_host=of("bootstrap_host", None),
            bootstrap_port=of("bootstrap_port", None),
            prefill_rank=body.get("disagg_prefill_dp_rank"),
        )

    def _rank(self, body: Mapping[str, Any], room: int | None) -> int | None:
        rank: int | None = body.get("routed_dp_rank")
        if rank is None:
            rank = body.get("data_parallel_rank")
        if rank is not None and not 0 <= rank < self.options.dp_size:
            raise Invalid(f"routed_dp_rank={rank} out of range [0, {self.options.dp_size})")
        if rank is None and room is not None and self.options.disaggregation == "prefill":
            rank = room % self.options.dp_size
        return self.next_rank() if rank is None or self.options.dp_size == 1 else rank

    def _verify(self, job: Job, given: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        """Checks in the tokenizer manager's order."""
        limit, length, sampling = self.options.model.context_length, len(job.prompt), job.sampling
        if length >= limit:
            raise Invalid(f"The input ({length} tokens) is longer than the model's context length ({limit} tokens).")
        if given.get("max_new_tokens") is not None and length + given["max_new_tokens"] > limit:
            wanted = given["max_new_tokens"]
            raise Invalid(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {length + wanted} tokens: {length} tokens from the input messages and {wanted} tokens for "
                "the completion. Please reduce the number of tokens in the input messages or the completion to fit "
                "within the limit."
            )
        if body.get("return_hidden_states"):
            raise Invalid(
                "The server is not configured to return hidden states. Please set `--return-hidden-states-mode last`, "
                "`--return-hidden-states-mode full`, or the legacy `--enable-return-hidden-states` flag."
            )
        if job.adapter and job.adapter not in self.options.lora_adapters:
            raise Invalid(
                f"LoRA adapter '{job.adapter}' was requested, but LoRA is not enabled. Please launch the server with "
                "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
            )
        size = self.options.model.vocab_size
        outside = next((token for token in job.token_ids_logprob if not 0 <= token < size), None)
        if job.return_logprob and outside is not None:
            raise Invalid(
                f"token_ids_logprob contains out-of-vocabulary token id {outside}; valid range is [0, {size})."
            )
        self._verify_tokenizer(sampling)
        verify_sampling(sampling, given, size)

    def _verify_tokenizer(self, sampling: Sampling) -> None:
        if not self.options.skip_tokenizer_init:
            return
        if sampling.stop:
            raise Invalid(
                f"stop={list(sampling.stop)} is unavailable when skip_tokenizer_init=True (requires tokenizer to "
                "decode tokens to text for matching)."
            )
        if sampling.min_new_tokens and self.options.min_new_tokens_needs_tokenizer:
            raise Invalid(
                f"min_new_tokens={sampling.min_new_tokens} is unavailable when skip_tokenizer_init=True (requires "
                "tokenizer for eos_token_id)."
            )


def _copies(params: Any) -> int:
    """Samples for each prompt, which all dictionaries must agree on. Raises `Invalid`, `Unhandled`."""
    several = params if isinstance(params, list) else [params or {}]
    counts = [item.get("n", 1) for item in several]
    if not counts or counts[0] is None:
        raise Unhandled("sampling_params: no number of samples")
    if any(count != counts[0] for count in counts):
        raise Invalid("The parallel_sample_num should be the same for all samples in sample params.")
    copies: int = max(1, counts[0])
    return copies


def _refuse_lists(body: Mapping[str, Any]) -> None:
    for name in _PER_PROMPT:
        value = body.get(name)
        listed = isinstance(value, list) and (name != "token_ids_logprob" or (value and isinstance(value[0], list)))
        if listed:
            raise Invalid(f"Cannot use list {name} with parallel_sample_num > 1")


def verify_sampling(sampling: Sampling, given: Mapping[str, Any], vocab_size: int) -> None:
    """SGLang's own checks of sampling values; `given` has the client's spelling. Raises `Invalid`."""
    limit = sampling.max_new_tokens
    minimum = sampling.min_new_tokens
    top_k = 1 if sampling.greedy else sampling.top_k
    rules = (
        (sampling.temperature >= 0, "temperature must be a non-negative finite number", "temperature"),
        (0 < sampling.top_p <= 1, "top_p must be in (0, 1]", "top_p"),
        (0 <= sampling.min_p <= 1, "min_p must be in [0, 1]", "min_p"),
        (top_k == -1 or top_k >= 1, "top_k must be -1 (disable) or at least 1", "top_k"),
        (-2 <= sampling.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]", "frequency_penalty"),
        (-2 <= sampling.presence_penalty <= 2, "presence_penalty must be in [-2, 2]", "presence_penalty"),
        (0 < sampling.repetition_penalty <= 2, "repetition_penalty must be in (0, 2]", "repetition_penalty"),
        (limit is None or limit >= 0, "max_new_tokens must be at least 0", "max_new_tokens"),
        (minimum >= 0, "min_new_tokens must be in [0, max_new_tokens]", "min_new_tokens"),
        (
            limit is None or minimum <= limit,
            f"min_new_tokens must be in [0, max_new_tokens({limit})]",
            "min_new_tokens",
        ),
    )
    for holds, message, name in rules:
        if not holds:
            raise Invalid(f"{message}, got {given.get(name, getattr(sampling, name))}.")
    if len(sampling.stop) > _MAX_STOPS:
        raise Invalid(f"at most {_MAX_STOPS} stop strings are allowed, got {len(sampling.stop)}")
    _verify_numbers(sampling, vocab_size)
    grammars = [sampling.json_schema, sampling.regex, sampling.ebnf, sampling.structural_tag]
    if sum(map(bool, grammars)) > 1:
        raise Invalid("Only one of json_schema, regex, ebnf or structural_tag can be set.")


def _verify_numbers(sampling: Sampling, vocab_size: int) -> None:
    for name, _ in sampling.logit_bias:
        try:
            inside = 0 <= int(name) < vocab_size
        except ValueError as exc:
            raise Invalid(str(exc)) from exc
        if not inside:
            raise Invalid(f"logit_bias must has keys in [0, {vocab_size - 1}], got {name}.")
    seed = sampling.sampling_seed
    if seed is not None and seed >= 1 << 63:
        raise Invalid(f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}.")


def schedule(job: Job, options: WorkerOptions) -> None:
    """The scheduler's checks. Raises `Aborted` or `Poisoned`."""
    model, length = options.model, len(job.prompt)
    if any(not 0 <= token < model.vocab_size for token in job.prompt):
        raise Poisoned("token id outside the vocabulary")
    if job.return_logprob and job.top_logprobs_num > model.vocab_size:
        raise Poisoned("top_logprobs_num above the vocabulary")
    if length > model.max_input:
        raise Aborted(
            f"Input length ({length} tokens) exceeds the maximum allowed length ({model.max_input} tokens). Use a "
            "shorter input or enable --allow-auto-truncate.",
            400,
            "BadRequestError",
        )
    if job.return_logprob and job.logprob_start_len > length:
        raise Aborted(
            f"req.logprob_start_len={job.logprob_start_len} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={length}. Please use a smaller logprob_start_len.",
            400,
            "BadRequestError",
        )
    if job.sampling.grammar and not options.grammar_backend:
        raise Aborted(
            "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported when the server is "
            "launched with --grammar-backend none",
            400,
            "BadRequestError",
        )
