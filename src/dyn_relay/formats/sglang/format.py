"""Native SGLang `/generate` as a format of the relay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import msgspec

from dyn_relay.formats.base import Answer, Bundle, Explanation, Limits, NativeRequest, Outbound, Rejected
from dyn_relay.formats.sglang.batch import Unsplit, asked, shares
from dyn_relay.formats.sglang.codec import Codec
from dyn_relay.formats.sglang.errors import refusal, rejected
from dyn_relay.formats.sglang.events import DONE_EVENT
from dyn_relay.formats.sglang.exchange import PATH, SglangExchange
from dyn_relay.formats.sglang.explain import STOCK, explain, refused
from dyn_relay.formats.sglang.infos import kv_events
from dyn_relay.formats.sglang.item import Common, Item, joined
from dyn_relay.formats.sglang.pair import ROOM, TIES, flaw
from dyn_relay.formats.sglang.request import ABSENT, Request
from dyn_relay.formats.sglang.rules import Rules
from dyn_relay.formats.sglang.wire import Foreign, NotJson, raw, read, write
from dyn_relay.formats.traits import Traits
from dyn_relay.formats.weights import WeightPolicy

_MODEL_INFO, _SERVER_INFO = "/model_info", "/server_info"

_infos = msgspec.json.Decoder(dict[str, object])

#: Token ids are int64 in the engine.
_ID_LIMIT = 2**63
#: What `/server_info` says in `disaggregation_mode`, and the role that this is.
_ROLES = {"null": "regular", "prefill": "prefill", "decode": "decode"}
#: More data-parallel ranks than any engine has.
_MOST_RANKS = 4096


class SglangFormat:
    """Stock SGLang, token mode.

    `on_abort="resume"` treats aborts that nobody explains as failed attempts. `weights`: which ones may continue an
    answer. `paired`: a prefill worker computes the prompt and another one the answer; `trusts_bootstrap`: clients may
    say where and how these two meet. `tells_recomputed`: answers say in `meta_info` which rows to replay were computed
    again.
    """

    name = "sglang"
    paths: frozenset[str] = frozenset({PATH})
    methods: frozenset[str] = frozenset({"POST", "PUT"})
    info_paths: tuple[str, ...] = (_MODEL_INFO, _SERVER_INFO)
    ready_path = "/ready"
    stock: Traits = STOCK
    #: How rows to replay are spelled.
    codec = Codec()

    def __init__(
        self,
        on_abort: Literal["relay", "resume"] = "relay",
        weights: WeightPolicy = WeightPolicy(),  # noqa: B008 - frozen
        *,
        tells_recomputed: bool = False,
        paired: bool = False,
        trusts_bootstrap: bool = False,
    ) -> None:
        self._rules = Rules(on_abort == "resume", weights, tells_recomputed, self.codec)
        self._paired = paired
        self._trusts_bootstrap = trusts_bootstrap

    def open(self, request: NativeRequest, rid: str) -> SglangExchange:
        """Begin a logical request. Raises `Rejected` for what is known to kill or wedge a stock engine (0.5.23)."""
        parsed = _spared(Request(request))
        self._check_pair(parsed, split=False)
        return self._exchange(parsed, rid)

    def split(self, request: NativeRequest, fresh: Callable[[], str]) -> SglangExchange | Bundle:
        """As `open`; a batch, or an `n` above 1, gives one exchange for each answer if it can be taken apart."""
        parsed = _spared(Request(request))
        self._check_pair(parsed, split=True)
        made = self._split(parsed, fresh)
        return made if isinstance(made, SglangExchange) else Bundle(parsed.rid or fresh(), made, DONE_EVENT, joined)

    def _check_pair(self, request: Request, *, split: bool) -> None:
        """Raises `Rejected` for what a pair of workers would hang on, or crash."""
        if not self._paired:
            return
        for name in TIES:
            if not self._trusts_bootstrap and request.value(name) not in (ABSENT, None):
                raise rejected(name, f"{name} is set by the proxy (see --trust-client-bootstrap).", request.stream)
        if words := flaw(request):
            raise rejected(ROOM, words, request.stream)
        want = asked(request)
        if want.generations > want.prompts and not split:
            words = "n above 1 is not for prefill/decode pairs: its samples would share a room (see --split-batches)."
            raise rejected("n", words, request.stream)

    def _split(self, parsed: Request, fresh: Callable[[], str]) -> SglangExchange | list[Item]:
        try:
            found = shares(parsed, fresh)
        except Unsplit as exc:
            self._check_pair(parsed, split=False)
            whole = self._exchange(parsed, fresh())
            whole.unsplit = exc.reason
            return whole
        common = Common()
        items = [Item(share, index, self._rules, common) for index, share in enumerate(found)]
        return items or self._exchange(parsed, fresh())

    def _exchange(self, request: Request, rid: str) -> SglangExchange:
        return SglangExchange(request, rid, self._rules)

    def traits(self, infos: dict[str, bytes]) -> Traits:
        """Read `/model_info` and `/server_info`; what is missing or unreadable stays unknown.

        Remembers the model's EOS ids if they are there (SGLang 0.5.23 does not tell them).
        """
        model, server = (_object(infos.get(path, b"")) for path in (_MODEL_INFO, _SERVER_INFO))
        merged = {**server, **model}
        skips_tokenizer = merged.get("skip_tokenizer_init")
        traits = Traits(
            version=_string(merged.get("version")),
            # A weight update from disk renames the model and its path; the tokenizer stays.
            model=_string(merged.get("tokenizer_path")) or _string(merged.get("served_model_name")),
            weight_version=_string(merged.get("weight_version")),
            text=None if not isinstance(skips_tokenizer, bool) else not skips_tokenizer,
            incremental=_boolean(merged.get("incremental_streaming_output")),
            sampling_defaults=_defaults(merged),
            max_input=_integer(merged.get("max_req_input_len")),
            deterministic=_boolean(merged.get("enable_deterministic_inference")),
            routed_experts=_boolean(merged.get("enable_return_routed_experts")),
            indexer_topk=_boolean(merged.get("enable_return_indexer_topk")),
            dp_size=_ranks(merged.get("dp_size")),
            role=_role(merged.get("disaggregation_mode")),
            bootstrap_port=_port(merged.get("disaggregation_bootstrap_port")),
            epoch=_epoch(server),
            kv_events=kv_events(merged.get("kv_events")),
            tool_call_parser=_string(merged.get("tool_call_parser")),
            reasoning_parser=_string(merged.get("reasoning_parser")),
        )
        for name in ("eos_token_id", "eos_token_ids"):
            told = merged.get(name)
            ids = map(_integer, told if isinstance(told, list) else [told])
            self._rules.stops[traits.model, traits.text].eos.update(one for one in ids if one is not None)
        return traits

    def explain(
        self, request: NativeRequest, traits: Traits, after: int, limited: Limits, *, split: bool = False
    ) -> Explanation:
        """See `Format.explain`. Nothing of it is remembered."""
        parsed = Request(request)
        if parsed.unreadable == "body":
            raise ValueError("body: must be a JSON object, as the engine reads them (no NaN, valid UTF-8)")
        if after < 0:
            raise ValueError(f"after: must be at least 0, not {after}")
        try:
            parsed = _spared(parsed)
            made = self._split(parsed, lambda: "given") if split else self._exchange(parsed, "given")
        except Rejected as exc:
            return refused(exc)
        ends = self._rules.stops[traits.model, traits.text].eos
        if isinstance(made, SglangExchange):
            return explain(made, traits, ends, after)
        verdicts = [limited(item.admit(traits), item.prompt_tokens) for item in made]
        index = next((at for at, verdict in enumerate(verdicts) if not verdict.migratable), 0)
        return replace(explain(made[index], traits, ends, after), index=index, answers=len(made))

    def abort(self, rid: str) -> Outbound:
        """The request that makes a worker drop the attempt `rid`."""
        return Outbound("POST", "/abort_request", write({"rid": raw(rid)}))

    def abort_all(self) -> Outbound:
        """The request that makes a worker drop everything."""
        return Outbound("POST", "/abort_request", b'{"abort_all":true}')

    def duplicate(self, request: NativeRequest, rid: str) -> Answer:
        """The answer to a request whose rid is still live."""
        return refusal(f"Duplicate request ID detected: {rid}", Request(request).stream)


def _spared(parsed: Request) -> Request:
    """The request, if it is not known to kill or wedge an engine. Raises `Rejected`."""
    if parsed.fields:
        try:
            _protect(parsed)
        except Rejected as refused:
            refused.rid = parsed.rid or ""
            raise
    return parsed


def _protect(request: Request) -> None:
    if request.lowest < 0:
        raise rejected("input_ids", f"input_ids contains a negative token id {request.lowest}.", request.stream)
    if request.highest >= _ID_LIMIT:
        raise rejected("input_ids", f"input_ids contains {request.highest}, which is no token id.", request.stream)
    for field, least in (("logprob_start_len", -1), ("top_logprobs_num", 0)):
        if field not in request.fields:
            continue
        value = request.value(field)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int) and one < least:
                raise rejected(field, f"{field} must be at least {least}, got {one}.", request.stream)


def _object(data: bytes) -> dict[str, object]:
    try:
        return read(_infos, data) if data else {}
    except (Foreign, NotJson):
        return {}


def _defaults(infos: dict[str, object]) -> dict[str, object] | None:
    if "preferred_sampling_params" not in infos:
        return None
    value = infos["preferred_sampling_params"]
    if isinstance(value, str):
        value = _object(value.encode())
    return value if isinstance(value, dict) else {}


def _role(value: object) -> str | None:
    return _ROLES.get(value) if isinstance(value, str) else None


def _port(value: object) -> int | None:
    port = _integer(value)
    return port if port is not None and 0 < port < 65536 else None


def _ranks(value: object) -> int | None:
    count = _integer(value)
    return count if count is not None and 0 < count <= _MOST_RANKS else None


def _epoch(server: dict[str, object]) -> str | None:
    """What tells one process from the next (0.5.23): the seed that it drew, unless it was given one, and how long its
    schedulers took to start, in seconds to the nanosecond. `startup_time` has more, but each HTTP process of one
    server may tell another `tokenizer_e2e`.
    """
    startup = server.get("startup_time")
    took = startup.get("scheduler_e2e") if isinstance(startup, dict) else None
    seed = _integer(server.get("random_seed"))
    return None if took is None and seed is None else f"{seed} {took}"


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _boolean(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
