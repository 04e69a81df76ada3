"""The table: all options of the proxy, by section, in the order of the page."""

# ruff: noqa: RUF009 - `option` makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dyn_relay.config.checks import (
    are_apart,
    are_grpc,
    are_labels,
    are_names,
    are_urls,
    are_urls_and_ports,
    can_ask_kubernetes,
    is_format,
    is_host,
    is_key,
    is_name_and_port,
    is_namespace,
    is_path,
    is_weight_policy,
)
from dyn_relay.config.option import ConfigError, Option, option, options_of

SERVER, WORKERS, DISCOVERY, MIGRATION, HEALTH, LIMITS, KEYS, OBSERVE = (
    "Server",
    "Workers",
    "Discovery",
    "Migration",
    "Health",
    "Timeouts and limits",
    "Keys",
    "Observation",
)

Policy = Literal[
    "least_loaded",
    "round_robin",
    "random",
    "power_of_two",
    "consistent_hashing",
    "cache_aware",
    "kv_aware",
    "manual",
]
OnAbort = Literal["relay", "resume"]
LogLevel = Literal["debug", "info", "warning", "error"]

#: Options that want `pd_disaggregation`, and those that cannot be used with it.
_PAIRED = ("prefill", "decode", "prefill_policy", "decode_policy", "decode_fallback", "trust_client_bootstrap")
_NOT_PAIRED = ("worker_urls", "discovery_file", "discovery_dns", "service_discovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The effective configuration. Raises `ConfigError` when a value is outside its bounds."""

    host: str = option(SERVER, "127.0.0.1", "Address to listen on.", verify=is_host)
    port: int = option(
        SERVER, 30000, "Port to listen on; 0 lets the system choose, and it is printed.", minimum=0, maximum=65535
    )
    processes: int = option(
        SERVER, 1, "How many processes serve the port, each with a view of the fleet of its own.", minimum=1, maximum=64
    )
    keep_alive_timeout_secs: float = option(SERVER, 90.0, "How long an idle client connection is kept open.", minimum=0)
    sse_keep_alive_interval_secs: float = option(
        SERVER, 0.0, "Send an SSE comment after this much silence on a client's stream; 0 = never.", minimum=0
    )
    coalesce_ms: float = option(
        SERVER,
        0.0,
        "Read a worker's stream at most once in so many milliseconds, and send the client all events that came "
        "meanwhile at once; 0 = each as it comes.",
        minimum=0,
        maximum=1000,
    )
    shutdown_grace_period_secs: float = option(
        SERVER,
        180.0,
        "After SIGTERM, how long live requests may go on. Make it longer than the longest one.",
        minimum=0,
    )

    worker_urls: tuple[str, ...] = option(
        WORKERS,
        (),
        "Engines to use from the start, e.g. http://10.0.0.1:30000, or grpc://10.0.0.1:30001 for one's gRPC server. "
        "Several, separated by spaces or commas.",
        verify=are_urls,
    )
    engine_url: tuple[str, ...] = option(
        WORKERS,
        (),
        "The same as --worker-urls; beside --prefill-engine-url as --decode.",
        verify=are_urls,
        metavar="URL ...",
    )
    policy: Policy = option(WORKERS, "least_loaded", "Which worker gets the next attempt.")
    pd_disaggregation: bool = option(
        WORKERS,
        False,
        "Workers are pairs: one computes the prompt, another one the answer. See --prefill and --decode.",
    )
    prefill: tuple[str, ...] = option(
        WORKERS,
        (),
        "With --pd-disaggregation: engines that compute prompts. The port behind a URL is its bootstrap port, if it is "
        "not the one that the engine itself tells; none = no port.",
        verify=are_urls_and_ports,
        metavar="URL [PORT] ...",
        repeats=True,
    )
    decode: tuple[str, ...] = option(
        WORKERS, (), "With --pd-disaggregation: engines that compute answers.", verify=are_urls, metavar="URL ..."
    )
    prefill_engine_url: tuple[str, ...] = option(
        WORKERS,
        (),
        "As --pd-disaggregation and --prefill, and --engine-url has the decode engines.",
        verify=are_urls_and_ports,
        metavar="URL [PORT] ...",
        repeats=True,
    )
    direct: bool = option(
        WORKERS, False, "All engines that are named here are gRPC servers: their URLs begin with grpc:// or grpcs://."
    )
    direct_backend: Literal["sglang"] = option(WORKERS, "sglang", "Whose gRPC service they have.")
    http_fallback: bool = option(
        WORKERS,
        False,
        "What gRPC cannot carry is sent to the HTTP port that the engine tells, instead of being refused.",
    )
    dyn_tool_call_parser: str | None = option(
        WORKERS,
        None,
        "Show this as the workers' tool-call parser, instead of what they tell.",
        env="DYN_TOOL_CALL_PARSER",
    )
    dyn_reasoning_parser: str | None = option(
        WORKERS,
        None,
        "Show this as the workers' reasoning parser, instead of what they tell.",
        env="DYN_REASONING_PARSER",
    )
    prefill_policy: Policy | None = option(WORKERS, None, "As --policy, for prefill workers; unset = as --policy.")
    decode_policy: Policy | None = option(WORKERS, None, "As --policy, for decode workers; unset = as --policy.")
    decode_fallback: bool = option(
        WORKERS,
        False,
        "While no prefill worker is left, let decode workers compute prompts, too, if they say that they can.",
    )
    trust_client_bootstrap: bool = option(
        WORKERS, False, "Let clients set bootstrap_host, bootstrap_port and bootstrap_room; without it they get a 400."
    )
    request_id_headers: tuple[str, ...] = option(
        WORKERS,
        (),
        "For consistent_hashing and manual: headers whose value names a request's session if it has no "
        "X-SMG-Routing-Key. The first one that is there counts.",
        verify=are_names,
    )
    balance_abs_threshold: int = option(
        WORKERS,
        64,
        "No affinity leads to a worker that has more answers than the mean by this, and by --balance-rel-threshold.",
        minimum=0,
    )
    balance_rel_threshold: float = option(
        WORKERS, 1.5, "As --balance-abs-threshold, times the mean; both must be exceeded.", minimum=1
    )
    cache_threshold: float = option(
        WORKERS,
        0.3,
        "Share of a prompt that a worker must have for cache_aware to send it there.",
        minimum=0,
        maximum=1,
    )
    cache_index_bytes: int = option(
        WORKERS, 268435456, "Memory for what cache_aware remembers of prompts, about.", minimum=1048576
    )
    dp_aware: bool = option(
        WORKERS, False, "Choose among the data-parallel ranks of workers, and name the rank in each request."
    )
    kv_overlap_score_weight: float = option(
        WORKERS,
        1.0,
        "With the policy kv_aware: what a prompt token costs that a worker has not cached, against the load.",
        minimum=0,
    )
    router_temperature: float = option(
        WORKERS,
        0.0,
        "With the policy kv_aware: how far chance may prefer a worse worker; 0 = always the best one.",
        minimum=0,
    )
    kv_index_max_blocks: int = option(
        WORKERS,
        4_000_000,
        "With the policy kv_aware: cached blocks that are remembered, of all workers together; each takes about 70 "
        "bytes.",
        minimum=1,
        maximum=1_000_000_000,
    )
    format: str = option(
        WORKERS,
        "sglang",
        "The wire format that the workers speak: sglang, or one that another package has brought.",
        env="DYN_GENERATE_FORMAT",
        verify=is_format,
    )
    upstream_pool_idle_timeout_secs: float = option(
        WORKERS,
        3.0,
        "How long an idle connection to a worker is used again. Stay below the engine's own 5 s.",
        minimum=0,
    )
    rejoin: Literal["always", "weight-version-match", "manual"] = option(
        WORKERS,
        "always",
        "When a worker that was dead, or is a new process, serves again: always (as soon as it is well), "
        "weight-version-match (once it has the weights of the others), or manual (once it is admitted or added again).",
    )
    forward_authorization: bool = option(
        WORKERS, False, "Pass the client's Authorization header on to workers (then no worker key is sent)."
    )

    discovery_file: str | None = option(
        DISCOVERY, None, "Follow the worker URLs in this file, one a line, as it changes.", metavar="PATH"
    )
    discovery_dns: str | None = option(
        DISCOVERY,
        None,
        "Follow the addresses of this name; each is a worker that listens on the port.",
        verify=is_name_and_port,
        metavar="NAME:PORT",
    )
    discovery_interval_secs: float = option(
        DISCOVERY, 5.0, "Pause between two looks at the file or the name.", minimum=0.001
    )
    service_discovery: bool = option(
        DISCOVERY, False, "Follow the ready pods of Kubernetes that --selector finds.", verify=can_ask_kubernetes
    )
    selector: tuple[str, ...] = option(
        DISCOVERY,
        (),
        "Labels that the pods carry, all of them, e.g. app=sglang role=engine.",
        verify=are_labels,
        metavar="KEY=VALUE ...",
    )
    service_discovery_namespace: str | None = option(
        DISCOVERY, None, "Only pods of this namespace; unset = of all.", verify=is_namespace
    )
    service_discovery_port: int = option(
        DISCOVERY, 80, "Port that the engines in the pods listen on.", minimum=1, maximum=65535
    )

    migration_limit: int = option(
        MIGRATION, 3, "How many times one request may be continued on another worker; 0 = never.", minimum=0
    )
    migration_max_seq_len: int | None = option(
        MIGRATION, None, "Longest sequence (prompt + delivered tokens) that is still continued; unset = any.", minimum=1
    )
    busy_patience_secs: float = option(
        MIGRATION,
        60.0,
        "How long a request that has tokens already waits for a worker whose queue is not full.",
        minimum=0,
    )
    migration_timeout_secs: float = option(
        MIGRATION, 0.0, "Time from the loss of an attempt to the next token, else it fails; 0 = no limit.", minimum=0
    )
    retry_permits: int = option(
        MIGRATION,
        32,
        "How many continuations may wait for their first token at a time, for each ready worker; the others wait for "
        "that. 0 = any number.",
        minimum=0,
    )
    replay_buffer_max: int | None = option(
        MIGRATION, None, "Longest request body, in bytes, that is still continued; unset = any.", minimum=1
    )
    on_abort: OnAbort = option(
        MIGRATION, "relay", "What to do when an engine says that somebody aborted the request: relay it, or resume."
    )
    abort_settle_secs: float = option(
        MIGRATION,
        5.0,
        "With --on-abort resume: nothing is resumed until engines have aborted nothing for so long, and none says that "
        "it is paused.",
        minimum=0,
    )
    weight_version_policy: str = option(
        MIGRATION,
        "any",
        "Which weights may continue an answer: any, same (as made its newest token), or max-lag=N (no two versions of "
        "an answer further apart than N; one that is no integer has no lag, and only equals fit).",
        verify=is_weight_policy,
    )
    tell_recomputed_rows: bool = option(
        MIGRATION,
        False,
        "Say in meta_info.dyn_relay_recomputed_rows which rows of routed_experts and indexer_topk a later worker has "
        "computed again.",
    )
    split_batches: bool = option(
        MIGRATION,
        False,
        "Make a request of its own of each prompt of a batch and each sample of n > 1, so that they can be continued.",
    )
    suspect_attempts: int = option(
        MIGRATION,
        1,
        "How many more workers are risked on a request whose worker died before its first token.",
        minimum=0,
    )
    poison_ttl_secs: float = option(
        MIGRATION,
        600.0,
        "How long a request that is suspected of killing workers is refused; 0 = nothing is suspected, and what was "
        "lost before its first token is not tried one by one.",
        minimum=0,
    )

    health_check_endpoint: str = option(HEALTH, "/health", "Path that a probe asks for with GET.", verify=is_path)
    health_check_interval_secs: float = option(HEALTH, 10.0, "Pause between two probes of a worker.", minimum=0.001)
    health_check_timeout_secs: float = option(
        HEALTH, 25.0, "Time a probe may take. SGLang's own /health takes 1 s, and up to 20 s when busy.", minimum=0.001
    )
    health_failure_threshold: int = option(
        HEALTH, 3, "Failed probes in a row until a worker gets no new requests. Its live streams go on.", minimum=1
    )
    health_success_threshold: int = option(
        HEALTH, 2, "Good probes in a row until such a worker gets new requests again.", minimum=1
    )
    inhibited_duration_secs: float = option(
        HEALTH,
        5.0,
        "How long a worker that failed a request is left out, unless a probe decides earlier.",
        minimum=0,
        env="DYN_RUNTIME_INHIBITED_DURATION_SECS",
    )

    cb_failure_threshold: int = option(
        HEALTH,
        5,
        "Incidents in a row, without a request that ended well, until a worker's circuit opens; 0 = never. All "
        "requests that one death ends are one incident.",
        minimum=0,
    )
    cb_timeout_duration_secs: float = option(
        HEALTH, 60.0, "How long an open circuit keeps requests away, whatever the probes say.", minimum=0
    )
    cb_success_threshold: int = option(
        HEALTH, 2, "Requests that must end well, one at a time, until the circuit closes again.", minimum=1
    )

    connect_timeout_secs: float = option(LIMITS, 5.0, "Time to connect to a worker.", minimum=0.001)
    first_token_timeout_secs: float = option(
        LIMITS, 0.0, "Time until an attempt's first token; then it goes elsewhere. 0 = no limit.", minimum=0
    )
    stall_timeout_secs: float = option(
        LIMITS, 120.0, "Silence within a stream until its worker is asked for its health; 0 = never.", minimum=0
    )
    request_timeout_secs: float = option(LIMITS, 0.0, "Time for a whole request; 0 = no limit.", minimum=0)
    max_concurrent_requests: int = option(
        LIMITS, -1, "How many generating requests are served at a time; 0 or -1 = any number.", minimum=-1
    )
    queue_size: int = option(LIMITS, 100, "How many more may wait for their turn; the next one gets 429.", minimum=0)
    queue_timeout_secs: float = option(LIMITS, 60.0, "How long one may wait for its turn; then it gets 503.", minimum=0)
    max_payload_size: int = option(
        LIMITS, 536870912, "Longest request body, in bytes; a longer one gets 413.", minimum=1
    )
    max_event_size: int = option(LIMITS, 268435456, "Longest single SSE event of a worker, in bytes.", minimum=1024)

    api_key: str | None = option(KEYS, None, "Clients must send this as a Bearer token.", secret=True)
    worker_api_key: str | None = option(KEYS, None, "Sent to workers as a Bearer token, probes too.", secret=True)
    admin_api_key: str | None = option(
        KEYS,
        None,
        "Needed, instead of the API key, for workers, aborts, and SGLang's own admin paths.",
        secret=True,
        verify=is_key,
    )

    trace_file: str | None = option(OBSERVE, None, "Append one JSON line per finished request to this file.")
    log_level: LogLevel = option(OBSERVE, "info", "The least that is logged.")
    log_json: bool = option(OBSERVE, False, "Log JSON lines instead of text.")
    seed: int | None = option(OBSERVE, None, "Seed of random choices (policy, backoff), to replay a run.")

    def __post_init__(self) -> None:
        for row in OPTIONS:
            row.check(getattr(self, row.name), f"{type(self).__name__}()")
        self._fold()
        if self.service_discovery and not self.selector:
            raise ConfigError("service_discovery: needs a selector, or every pod of the cluster would be a worker")
        for name in _NOT_PAIRED if self.pd_disaggregation else _PAIRED:
            if getattr(self, name):
                need = "says nothing of roles; use prefill and decode" if self.pd_disaggregation else "means nothing"
                which = f"with{'' if self.pd_disaggregation else 'out'} pd_disaggregation (--pd-disaggregation)"
                raise ConfigError(f"{name}: {need} {which}")
        try:
            are_apart(self.prefill, self.decode)
        except ValueError as exc:
            raise ConfigError(f"prefill, decode: {exc}") from None
        for name in ("selector", "service_discovery_namespace"):
            if getattr(self, name) and not self.service_discovery:
                raise ConfigError(f"{name}: finds nobody without service_discovery")
        if self.direct:
            try:
                are_grpc((*self.worker_urls, *self.prefill, *self.decode))
            except ValueError as exc:
                raise ConfigError(f"direct: {exc}") from None

    def _fold(self) -> None:
        """What is named in other words is what it means, from here on."""
        paired = bool(self.prefill_engine_url)
        plain = "decode" if paired else "worker_urls"
        folded = {plain: tuple(dict.fromkeys((*getattr(self, plain), *self.engine_url))), "engine_url": ()}
        if paired:
            folded |= {"prefill": (*self.prefill, *self.prefill_engine_url), "prefill_engine_url": ()}
            object.__setattr__(self, "pd_disaggregation", True)
        for name, value in folded.items():
            object.__setattr__(self, name, value)


#: Its rows.
OPTIONS: tuple[Option, ...] = options_of(Config)


def sections() -> dict[str, list[Option]]:
    """The table, by section."""
    found: dict[str, list[Option]] = {}
    for row in OPTIONS:
        found.setdefault(row.section, []).append(row)
    return found
