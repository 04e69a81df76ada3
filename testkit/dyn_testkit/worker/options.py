"""How a mock worker is set up: one frozen value, most of it named after SGLang's server flags."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dyn_testkit.engine import Model
from dyn_testkit.tokenizer import PLAIN, Tokenizer
from dyn_testkit.worker.kv_cache import KvOptions

Dialect = Literal["cumulative", "incremental", "mixed"]
AbortMatch = Literal["prefix", "exact"]
Disaggregation = Literal["null", "prefill", "decode"]


def in_base64(data: bytes) -> str:
    """As stock spells rows."""
    return base64.b64encode(data).decode()


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """A worker's setup. Times in seconds of trio's clock; 0 is "as fast as possible"."""

    model: Model = field(default_factory=Model)
    #: Reported as `model_path` and `served_model_name`.
    model_path: str = "mock/model"
    version: str = "0.5.23"
    weight_version: str = "default"
    #: Answers and infos tell it, as stock does.
    tells_versions: bool = True
    #: Knows the paths that tell what it is; older releases spell them otherwise.
    infos: bool = True
    #: How streams are spelled: everything so far, deltas, or delta ids with cumulative logprobs.
    dialect: Dialect = "cumulative"
    #: No tokenizer: answers carry no text, text prompts and stop strings are refused.
    skip_tokenizer_init: bool = True
    #: The one that is there unless it is skipped.
    tokenizer: Tokenizer = PLAIN
    #: Refuse `min_new_tokens` without a tokenizer, as 0.5.23 does.
    min_new_tokens_needs_tokenizer: bool = True
    #: One forward pass takes this long and gives this many tokens (more than 1: coalesced events).
    tick: float = 0.0
    tokens_per_tick: int = 1
    stream_interval: int = 1
    #: The last token comes in one event, its finish in the next (old engines, speculative decoding).
    late_finish: bool = False
    preferred_sampling_params: Mapping[str, Any] | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    #: Where the gRPC side listens (0: the system chooses); None: there is none.
    grpc_port: int | None = None
    #: Seconds without a message until a call ends (`--grpc-response-timeout-secs`), and seconds that a client may leave
    #: a message unread.
    grpc_response_timeout: float = 300.0
    grpc_backpressure_timeout: float = 300.0
    api_key: str | None = None
    admin_api_key: str | None = None
    #: `/abort_request` of a live rid takes with it those that begin with it (the scheduler's rule), or not.
    abort_match: AbortMatch = "prefix"
    radix_cache: bool = True
    #: Keep whole pages, publish them over ZeroMQ, and count `cached_tokens` by them; None: a cache of single tokens,
    #: of which nobody hears.
    kv_events: KvOptions | None = None
    #: Samples by (seed, position). If not, seeds are ignored, and every request has a draw of its own.
    deterministic: bool = True
    routed_experts: bool = False
    indexer_topk: bool = False
    #: Added to every number of these rows, so that they tell which worker made them. Keep it a multiple of
    #: `model.experts`.
    expert_mark: int = 0
    #: What becomes of the bytes of `routed_experts` before they are in Base64: some engines compress them.
    packing: Callable[[bytes], bytes] = bytes
    #: The string that its value is then; Base64 unless an engine spells it otherwise.
    spelling: Callable[[bytes], str] = in_base64
    #: Each event has the rows so far, not the finish alone: no engine that is known does so.
    early_rows: bool = False
    grammar_backend: bool = True
    lora_adapters: tuple[str, ...] = ()
    dp_size: int = 1
    #: The whole of a request, or one leg of a prefill/decode pair.
    disaggregation: Disaggregation = "null"
    #: Where a prefill worker's bootstrap server listens (0: the system chooses), and a decode worker looks for one if a
    #: request does not say.
    bootstrap_port: int = 8998
    #: Forward passes that the transfer of a prompt takes.
    transfer_ticks: int = 1
    #: How long a prefill leg waits for its decode leg (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`), and a decode leg for
    #: what it is to be given (`..._WAITING_TIMEOUT`).
    bootstrap_timeout: float = 300.0
    waiting_timeout: float = 300.0
    #: A decode leg that waits looks this often whether the prefill worker is there; two failures are enough.
    heartbeat: float = 5.0
    #: Idle connections are closed after this long (uvicorn's default).
    keep_alive: float = 5.0
    #: `/health` runs a token and polls once a second on a real engine.
    health_delay: float = 0.0
    #: Silence between a poisonous request and the death of the worker (5.1 s on a real engine).
    death_delay: float = 0.0
    #: Honour the header `x-mock-fault`.
    allow_header_faults: bool = False
    #: Wall clock at the time 0 of trio's clock: wall times in answers are reproducible.
    epoch: float = 1_800_000_000.0

    def __post_init__(self) -> None:
        """Raises `ValueError`: what nobody knows would silently be something else."""
        for name, kind in (("dialect", Dialect), ("abort_match", AbortMatch), ("disaggregation", Disaggregation)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}: must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
