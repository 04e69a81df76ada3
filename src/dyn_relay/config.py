"""Every option of the proxy: one table, three sources (flag > environment > TOML file), one frozen value.

The table is the `Config` class itself: each field carries its section, bounds and help. The command line, the
environment's names, the file's keys and `docs/configuration.md` (`python -m dyn_relay.config`) are derived from it.
"""

# ruff: noqa: RUF009 - `_option` makes a dataclass field

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

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


class ConfigError(ValueError):
    """A value cannot be used. The message names the option, what is wrong, and where the value came from."""


def _is_path(value: object) -> None:
    if not str(value).startswith("/") or not all(0x21 <= ord(character) <= 0x7E for character in str(value)):
        raise ValueError("must begin with /, and be printable ASCII without blanks")


def _is_host(value: object) -> None:
    if not str(value).strip():
        raise ValueError("must not be empty: that would be every address of this machine; say 0.0.0.0 if you mean it")


def _is_key(value: object) -> None:
    if value is not None and not (str(value) and all(0x21 <= ord(character) <= 0x7E for character in str(value))):
        raise ValueError("must be printable ASCII without blanks or line ends")


def _is_weight_policy(value: object) -> None:
    from dyn_relay.formats.weights import WeightPolicy  # late, as below

    WeightPolicy(str(value))


def _are_urls(value: object) -> None:
    if not value:
        return
    from dyn_relay.http11.client import Origin  # late: `--help` needs no network code

    for url in cast("tuple[str, ...]", value):
        Origin.parse(url)


def _are_names(value: object) -> None:
    for name in cast("tuple[str, ...]", value):
        if not all(character.isascii() and (character.isalnum() or character in "-_.") for character in name):
            raise ValueError(f"{name!r} is no header's name")


def _is_name_and_port(value: object) -> None:
    if value is None:
        return
    from dyn_relay.http11.origin import Origin  # late, as above

    if not re.fullmatch(r"[^/]+:[0-9]+", str(value)):
        raise ValueError("must be NAME:PORT")
    Origin.parse(f"http://{value}")


def _is_namespace(value: object) -> None:
    if value is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", str(value)):
        raise ValueError("must be the name of a namespace: lower-case letters, digits and hyphens")


def _are_labels(value: object) -> None:
    for label in cast("tuple[str, ...]", value):
        if not re.fullmatch(r"([\w.-]+/)?[\w.-]+=[\w.-]*", label, re.ASCII):
            raise ValueError(f"{label!r}: must be KEY=VALUE, a label of the pods")


def _can_ask_kubernetes(value: object) -> None:
    if value and importlib.util.find_spec("lightkube") is None:
        raise ValueError("needs an extra: pip install 'dyn-relay[kubernetes]'")


def _option(
    section: str,
    default: object,
    text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    env: str = "",
    secret: bool = False,
    verify: Callable[[object], None] | None = None,
    metavar: str = "",
) -> Any:
    rules: dict[str, object] = {"section": section, "help": text, "minimum": minimum, "maximum": maximum}
    rules |= {"env": env, "metavar": metavar, "secret": secret, "verify": _is_key if secret else verify}
    return dataclasses.field(default=default, repr=not secret, metadata=rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The effective configuration. Raises `ConfigError` when a value is outside its bounds."""

    host: str = _option(SERVER, "127.0.0.1", "Address to listen on.", verify=_is_host)
    port: int = _option(
        SERVER, 30000, "Port to listen on; 0 lets the system choose, and it is printed.", minimum=0, maximum=65535
    )
    processes: int = _option(
        SERVER, 1, "How many processes serve the port, each with a view of the fleet of its own.", minimum=1, maximum=64
    )
    keep_alive_timeout_secs: float = _option(
        SERVER, 90.0, "How long an idle client connection is kept open.", minimum=0
    )
    sse_keep_alive_interval_secs: float = _option(
        SERVER, 0.0, "Send an SSE comment after this much silence on a client's stream; 0 = never.", minimum=0
    )
    shutdown_grace_period_secs: float = _option(
        SERVER,
        180.0,
        "After SIGTERM, how long live requests may go on. Make it longer than the longest one.",
        minimum=0,
    )

    worker_urls: tuple[str, ...] = _option(
        WORKERS,
        (),
        "Engines to use from the start, e.g. http://10.0.0.1:30000. Several, separated by spaces or commas.",
        verify=_are_urls,
    )
    policy: Policy = _option(WORKERS, "least_loaded", "Which worker gets the next attempt.")
    request_id_headers: tuple[str, ...] = _option(
        WORKERS,
        (),
        "For consistent_hashing and manual: headers whose value names a request's session if it has no "
        "X-SMG-Routing-Key. The first one that is there counts.",
        verify=_are_names,
    )
    balance_abs_threshold: int = _option(
        WORKERS,
        64,
        "No affinity leads to a worker that has more answers than the mean by this, and by --balance-rel-threshold.",
        minimum=0,
    )
    balance_rel_threshold: float = _option(
        WORKERS, 1.5, "As --balance-abs-threshold, times the mean; both must be exceeded.", minimum=1
    )
    cache_threshold: float = _option(
        WORKERS,
        0.3,
        "Share of a prompt that a worker must have for cache_aware to send it there.",
        minimum=0,
        maximum=1,
    )
    cache_index_bytes: int = _option(
        WORKERS, 268435456, "Memory for what cache_aware remembers of prompts, about.", minimum=1048576
    )
    dp_aware: bool = _option(
        WORKERS, False, "Choose among the data-parallel ranks of workers, and name the rank in each request."
    )
    kv_overlap_score_weight: float = _option(
        WORKERS,
        1.0,
        "With the policy kv_aware: what a prompt token costs that a worker has not cached, against the load.",
        minimum=0,
    )
    router_temperature: float = _option(
        WORKERS,
        0.0,
        "With the policy kv_aware: how far chance may prefer a worse worker; 0 = always the best one.",
        minimum=0,
    )
    kv_index_max_blocks: int = _option(
        WORKERS,
        4_000_000,
        "With the policy kv_aware: cached blocks that are remembered, of all workers together; each takes about 70 "
        "bytes.",
        minimum=1,
        maximum=1_000_000_000,
    )
    format: Literal["sglang"] = _option(WORKERS, "sglang", "The wire format that the workers speak.")
    upstream_pool_idle_timeout_secs: float = _option(
        WORKERS, 3.0, "How long an idle connection to a worker is kept. Stay below the engine's own 5 s.", minimum=0
    )
    rejoin: Literal["always", "weight-version-match", "manual"] = _option(
        WORKERS,
        "always",
        "When a worker that was dead, or is a new process, serves again: always (as soon as it is well), "
        "weight-version-match (once it has the weights of the others), or manual (once it is admitted or added again).",
    )
    forward_authorization: bool = _option(
        WORKERS, False, "Pass the client's Authorization header on to workers (then no worker key is sent)."
    )

    discovery_file: str | None = _option(
        DISCOVERY, None, "Follow the worker URLs in this file, one a line, as it changes.", metavar="PATH"
    )
    discovery_dns: str | None = _option(
        DISCOVERY,
        None,
        "Follow the addresses of this name; each is a worker that listens on the port.",
        verify=_is_name_and_port,
        metavar="NAME:PORT",
    )
    discovery_interval_secs: float = _option(
        DISCOVERY, 5.0, "Pause between two looks at the file or the name.", minimum=0.001
    )
    service_discovery: bool = _option(
        DISCOVERY, False, "Follow the ready pods of Kubernetes that --selector finds.", verify=_can_ask_kubernetes
    )
    selector: tuple[str, ...] = _option(
        DISCOVERY,
        (),
        "Labels that the pods carry, all of them, e.g. app=sglang role=engine.",
        verify=_are_labels,
        metavar="KEY=VALUE ...",
    )
    service_discovery_namespace: str | None = _option(
        DISCOVERY, None, "Only pods of this namespace; unset = of all.", verify=_is_namespace
    )
    service_discovery_port: int = _option(
        DISCOVERY, 80, "Port that the engines in the pods listen on.", minimum=1, maximum=65535
    )

    migration_limit: int = _option(
        MIGRATION, 3, "How many times one request may be continued on another worker; 0 = never.", minimum=0
    )
    migration_max_seq_len: int | None = _option(
        MIGRATION, None, "Longest sequence (prompt + delivered tokens) that is still continued; unset = any.", minimum=1
    )
    busy_patience_secs: float = _option(
        MIGRATION,
        60.0,
        "How long a request that has tokens already waits for a worker whose queue is not full.",
        minimum=0,
    )
    migration_timeout_secs: float = _option(
        MIGRATION, 0.0, "Time from the loss of an attempt to the next token, else it fails; 0 = no limit.", minimum=0
    )
    retry_permits: int = _option(
        MIGRATION,
        32,
        "How many continuations may wait for their first token at a time, for each ready worker; the others wait for "
        "that. 0 = any number.",
        minimum=0,
    )
    replay_buffer_max: int | None = _option(
        MIGRATION, None, "Longest request body, in bytes, that is still continued; unset = any.", minimum=1
    )
    on_abort: OnAbort = _option(
        MIGRATION, "relay", "What to do when an engine says that somebody aborted the request: relay it, or resume."
    )
    abort_settle_secs: float = _option(
        MIGRATION,
        5.0,
        "With --on-abort resume: nothing is resumed until engines have aborted nothing for so long, and none says that "
        "it is paused.",
        minimum=0,
    )
    weight_version_policy: str = _option(
        MIGRATION,
        "any",
        "Which weights may continue an answer: any, same (as made its newest token), or max-lag=N (no two versions of "
        "an answer further apart than N; one that is no integer has no lag, and only equals fit).",
        verify=_is_weight_policy,
    )
    tell_recomputed_rows: bool = _option(
        MIGRATION,
        False,
        "Say in meta_info.dyn_relay_recomputed_rows which rows of routed_experts and indexer_topk a later worker has "
        "computed again.",
    )
    split_batches: bool = _option(
        MIGRATION,
        False,
        "Make a request of its own of each prompt of a batch and each sample of n > 1, so that they can be continued.",
    )
    suspect_attempts: int = _option(
        MIGRATION,
        1,
        "How many more workers are risked on a request whose worker died before its first token.",
        minimum=0,
    )
    poison_ttl_secs: float = _option(
        MIGRATION, 600.0, "How long a request that is suspected of killing workers is refused.", minimum=0
    )

    health_check_endpoint: str = _option(HEALTH, "/health", "Path that a probe asks for with GET.", verify=_is_path)
    health_check_interval_secs: float = _option(HEALTH, 10.0, "Pause between two probes of a worker.", minimum=0.001)
    health_check_timeout_secs: float = _option(
        HEALTH, 25.0, "Time a probe may take. SGLang's own /health takes 1 s, and up to 20 s when busy.", minimum=0.001
    )
    health_failure_threshold: int = _option(
        HEALTH, 3, "Failed probes in a row until a worker gets no new requests. Its live streams go on.", minimum=1
    )
    health_success_threshold: int = _option(
        HEALTH, 2, "Good probes in a row until such a worker gets new requests again.", minimum=1
    )
    inhibited_duration_secs: float = _option(
        HEALTH,
        5.0,
        "How long a worker that failed a request is left out, unless a probe decides earlier.",
        minimum=0,
        env="DYN_RUNTIME_INHIBITED_DURATION_SECS",
    )

    cb_failure_threshold: int = _option(
        HEALTH,
        5,
        "Incidents in a row, without a request that ended well, until a worker's circuit opens; 0 = never. All "
        "requests that one death ends are one incident.",
        minimum=0,
    )
    cb_timeout_duration_secs: float = _option(
        HEALTH, 60.0, "How long an open circuit keeps requests away, whatever the probes say.", minimum=0
    )
    cb_success_threshold: int = _option(
        HEALTH, 2, "Requests that must end well, one at a time, until the circuit closes again.", minimum=1
    )

    connect_timeout_secs: float = _option(LIMITS, 5.0, "Time to connect to a worker.", minimum=0.001)
    first_token_timeout_secs: float = _option(
        LIMITS, 0.0, "Time until an attempt's first token; then it goes elsewhere. 0 = no limit.", minimum=0
    )
    stall_timeout_secs: float = _option(
        LIMITS, 120.0, "Silence within a stream until its worker is asked for its health; 0 = never.", minimum=0
    )
    request_timeout_secs: float = _option(LIMITS, 0.0, "Time for a whole request; 0 = no limit.", minimum=0)
    max_concurrent_requests: int = _option(
        LIMITS, -1, "How many generating requests are served at a time; 0 or -1 = any number.", minimum=-1
    )
    queue_size: int = _option(LIMITS, 100, "How many more may wait for their turn; the next one gets 429.", minimum=0)
    queue_timeout_secs: float = _option(
        LIMITS, 60.0, "How long one may wait for its turn; then it gets 503.", minimum=0
    )
    max_payload_size: int = _option(
        LIMITS, 536870912, "Longest request body, in bytes; a longer one gets 413.", minimum=1
    )
    max_event_size: int = _option(LIMITS, 268435456, "Longest single SSE event of a worker, in bytes.", minimum=1024)

    api_key: str | None = _option(KEYS, None, "Clients must send this as a Bearer token.", secret=True)
    worker_api_key: str | None = _option(KEYS, None, "Sent to workers as a Bearer token, probes too.", secret=True)
    admin_api_key: str | None = _option(
        KEYS,
        None,
        "Needed, instead of the API key, for workers, aborts, and SGLang's own admin paths.",
        secret=True,
        verify=_is_key,
    )

    trace_file: str | None = _option(OBSERVE, None, "Append one JSON line per finished request to this file.")
    log_level: LogLevel = _option(OBSERVE, "info", "The least that is logged.")
    log_json: bool = _option(OBSERVE, False, "Log JSON lines instead of text.")
    seed: int | None = _option(OBSERVE, None, "Seed of every random choice (policy, backoff, names), to replay a run.")

    def __post_init__(self) -> None:
        for option in OPTIONS:
            option.check(getattr(self, option.name), f"{type(self).__name__}()")
        if self.service_discovery and not self.selector:
            raise ConfigError("service_discovery: needs a selector, or every pod of the cluster would be a worker")
        if self.selector and not self.service_discovery:
            raise ConfigError("selector: finds nobody without service_discovery")


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of value: its words, and its reader: takes a string or a TOML value, raises Type- or ValueError."""

    word: str
    metavar: str
    read: Callable[[object], object]


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    kind: Kind
    choices: tuple[str, ...]
    default: object
    section: str
    help: str
    minimum: float | None
    maximum: float | None
    env: str
    secret: bool
    verify: Callable[[object], None] | None
    #: How its value is called in the help, if not by its kind.
    metavar: str

    @property
    def flag(self) -> str:
        """The long flag, e.g. `--log-json`."""
        return "--" + self.name.replace("_", "-")

    @property
    def many(self) -> bool:
        """It takes several values."""
        return self.kind is _LIST

    @property
    def switch(self) -> bool:
        """It is on or off: the flag takes no value and has a `--no-` twin."""
        return self.kind is _BOOL

    def read(self, raw: object, source: str) -> object:
        """A value from the outside, as its type. Raises `ConfigError`."""
        try:
            value = self.kind.read(raw)
        except (TypeError, ValueError):
            raise self._error(f"must be {self.kind.word}", raw, source) from None
        self.check(value, source)
        return value

    def check(self, value: object, source: str) -> None:
        """Raise `ConfigError` unless `value`, of the right type, is within the option's bounds."""
        if isinstance(value, int | float):
            if self.minimum is not None and not value >= self.minimum:
                raise self._error(f"must be at least {self.minimum:g}", value, source)
            if self.maximum is not None and not value <= self.maximum:
                raise self._error(f"must be at most {self.maximum:g}", value, source)
        if self.choices and value not in self.choices:
            raise self._error("must be one of " + ", ".join(self.choices), value, source)
        if self.verify is not None:
            try:
                self.verify(value)
            except ValueError as exc:
                raise ConfigError(f"{self.name}: {exc} (from {source})") from None

    def show(self, value: object) -> str:
        """The value for people; a secret is never shown."""
        if value is None or value == ():
            return ""
        if self.secret:
            return "***"
        if isinstance(value, tuple):
            return " ".join(value)
        if isinstance(value, bool):
            return str(value).lower()
        return f"{value:g}" if isinstance(value, float) else str(value)

    def _error(self, problem: str, value: object, source: str) -> ConfigError:
        return ConfigError(f"{self.name}: {problem}{'' if self.secret else f', not {value!r}'} (from {source})")


def _read_text(raw: object) -> object:
    if not isinstance(raw, str):
        raise TypeError
    return raw


def _read_int(raw: object) -> object:
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise TypeError
    return int(raw)


def _read_float(raw: object) -> object:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float) or not math.isfinite(float(raw)):
        raise ValueError
    return float(raw)


_SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _read_bool(raw: object) -> object:
    if isinstance(raw, bool):
        return raw
    if not isinstance(raw, str) or raw.lower() not in _SWITCH:
        raise ValueError
    return _SWITCH[raw.lower()]


def _read_list(raw: object) -> object:
    items = [raw] if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError
    return tuple(dict.fromkeys(part for item in items for part in item.replace(",", " ").split()))


_BOOL = Kind("true or false", "", _read_bool)
_LIST = Kind("a list of strings", "TEXT ...", _read_list)
_TEXT = Kind("a string", "TEXT", _read_text)
_KINDS: dict[object, Kind] = {
    str: _TEXT,
    int: Kind("a whole number", "N", _read_int),
    float: Kind("a number", "N", _read_float),
    bool: _BOOL,
    tuple[str, ...]: _LIST,
}


def _options() -> tuple[Option, ...]:
    hints = typing.get_type_hints(Config)
    rows = []
    for field in dataclasses.fields(Config):
        hint = hints[field.name]
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        if type(None) in typing.get_args(hint):
            hint = typing.get_args(hint)[0]
        rules = {**field.metadata, "env": field.metadata["env"] or f"DYN_{field.name.upper()}"}
        kind = _TEXT if choices else _KINDS[hint]
        rows.append(Option(name=field.name, kind=kind, choices=choices, default=field.default, **rules))
    return tuple(rows)


#: The table, in the order of the page.
OPTIONS: tuple[Option, ...] = _options()
CONFIG_ENV = "DYN_CONFIG"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and, for each option, where its value came from ("default" included)."""

    config: Config
    origins: Mapping[str, str]


def load(flags: Mapping[str, object], environ: Mapping[str, str], file: str | None = None) -> Loaded:
    """Merge the sources: a flag wins over the environment, that over the file (`file`, else `DYN_CONFIG`).

    `flags` holds only what was given, by option name. An empty environment value counts as not given. Raises
    `ConfigError` for a value that cannot be used and for a key of the file that is no option.
    """
    path = file or environ.get(CONFIG_ENV)
    stored = _read_file(path) if path else {}
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for option in OPTIONS:
        source, raw = "default", None
        if flags.get(option.name) is not None:
            source, raw = option.flag, flags[option.name]
        elif environ.get(option.env):
            source, raw = option.env, environ[option.env]
        elif option.name in stored:
            source, raw = str(path), stored[option.name]
        origins[option.name] = source
        if source != "default":
            values[option.name] = option.read(raw, source)
    return Loaded(Config(**cast("dict[str, Any]", values)), origins)


def _read_file(path: str) -> dict[str, object]:
    try:
        stored = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"config: cannot read {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config: {path} is not TOML: {exc}") from exc
    unknown = sorted(stored.keys() - {option.name for option in OPTIONS})
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such option (from {path})")
    return stored


def sections() -> dict[str, list[Option]]:
    """The table, by section."""
    found: dict[str, list[Option]] = {}
    for option in OPTIONS:
        found.setdefault(option.section, []).append(option)
    return found


@functools.cache
def reference() -> str:
    """The page `docs/configuration.md`."""
    lines = [
        "# Configuration",
        "",
        "<!-- Generated: python -m dyn_relay.config > docs/configuration.md -->",
        "",
        "A flag wins over its environment variable, that over the TOML file named by `--config` (or `DYN_CONFIG`).",
        "The file's keys are the names below, at the top level. Times are seconds.",
        "`dyn-relay check` prints the effective value of each option and where it came from; keys are shown as `***`.",
        "Give keys by environment or file: flags can be read by every user of the machine.",
    ]
    for section, options in sections().items():
        lines += ["", f"## {section}", "", "| key | flag | environment | default | meaning |", "|---|---|---|---|---|"]
        for o in options:
            flag = f"`{o.flag}`" + (f" / `--no-{o.flag[2:]}`" if o.switch else "")
            default = f"`{o.show(o.default)}`" if o.show(o.default) else "unset"
            text = o.help + (f" One of {', '.join(f'`{c}`' for c in o.choices)}." if o.choices else "")
            lines.append(f"| `{o.name}` | {flag} | `{o.env}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
