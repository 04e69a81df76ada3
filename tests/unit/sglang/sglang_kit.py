"""A small engine of the tests' own, written apart from the code under test, and a client that reads its dialects."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from dyn_relay.formats.base import End, Event, NativeRequest, Reading
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import Traits

SSE_HEAD = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON_HEAD = [(b"content-type", b"application/json")]
DIALECTS = ("cumulative", "incremental", "mixed")
#: A worker that told its sampling defaults: it has none.
TOLD = Traits(sampling_defaults={})
DONE: Event = (b"data: [DONE]\n\n", b"[DONE]")


def dumps(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def sse(value: object) -> Event:
    data = value if isinstance(value, bytes) else dumps(value)
    return b"data: " + data + b"\n\n", data


def request(body: object, headers: list[tuple[bytes, bytes]] | None = None, method: str = "POST") -> NativeRequest:
    data = body if isinstance(body, bytes) else dumps(body)
    return NativeRequest(method, "/generate", JSON_HEAD if headers is None else headers, data)


def opened(body: object, traits: Traits = TOLD, **options: Any) -> SglangExchange:
    exchange = SglangFormat(**options).open(request(body), "given")
    exchange.admit(traits)
    return exchange


def token(history: list[int]) -> int:
    """The next token: a function of everything before it, so a wrong prefix changes all that follows."""
    return int.from_bytes(hashlib.sha256(repr(history).encode()).digest()[:4], "big") % 50_000


def row(history: list[int], chosen: int) -> list[Any]:
    return [-len(history) / 7 - chosen / 1e6, chosen, None]


@dataclass
class Answer:
    """What the uninterrupted run gives."""

    ids: list[int]
    logprobs: list[Any]
    tops: list[Any]
    finish: dict[str, Any]


def oracle(body: dict[str, Any]) -> Answer:
    params = body.get("sampling_params") or {}
    history = list(body["input_ids"])
    most, stops = params.get("max_new_tokens", 128), params.get("stop_token_ids") or []
    answer = Answer([], [], [], {"type": "length", "length": most})
    while len(answer.ids) < most:
        chosen = token(history)
        answer.ids.append(chosen)
        answer.logprobs.append(row(history, chosen))
        answer.tops.append([row(history, chosen), row(history, chosen + 1)])
        history.append(chosen)
        if chosen in stops and len(answer.ids) > params.get("min_new_tokens", 0) and not params.get("ignore_eos"):
            answer.finish = {"type": "stop", "matched": chosen}
            break
    return answer


def prompt_rows(body: dict[str, Any]) -> list[Any]:
    ids, start = body["input_ids"], body.get("logprob_start_len", -1)
    if start is None or start < 0:
        return []
    return [[None if at == start else -at / 3, ids[at], None] for at in range(start, len(ids))]


@dataclass
class Engine:
    """One worker. `chunks` are the tokens of each event; what they leave comes one by one."""

    dialect: str = "cumulative"
    chunks: tuple[int, ...] = ()
    version: str = "default"
    #: So many tokens after the first event the weights change, and `version` gets a dash.
    turn: int | None = None
    cached: int = 0
    late_finish: bool = False
    extra: bool = False
    nan: bool = False
    #: The prompt's logprobs come with the first event only, as in some releases.
    prompt_once: bool = False

    def turned(self) -> int | None:
        """The first token that the new weights make."""
        return None if self.turn is None else self.turn + (self.chunks[0] if self.chunks else 1)

    def label(self, token: int) -> str:
        """Which weights make a token of an attempt, counted from 0."""
        turned = self.turned()
        return self.version if turned is None or token < turned else self.version + "'"

    def spans(self, total: int) -> list[dict[str, Any]]:
        """As the engine tells them with its finish."""
        turned = self.turned()
        if turned is None or turned >= total:
            return [{"version": self.version, "start": 0, "end": total}]
        return [
            {"version": self.version, "start": 0, "end": turned},
            {"version": self.label(turned), "start": turned, "end": total},
        ]

    def events(self, body: dict[str, Any]) -> list[Event]:
        answer, total, out = oracle(body), 0, []
        sizes = list(self.chunks)
        while total < len(answer.ids):
            step = min(sizes.pop(0) if sizes else 1, len(answer.ids) - total)
            total += step
            last = total == len(answer.ids) and not self.late_finish
            out.append(self._event(body, answer, total - step, total, last, first=not out))
        if self.late_finish or not answer.ids:
            out.append(self._event(body, answer, total, total, last=True, first=not out))
        return [*map(sse, out), DONE]

    def _event(self, body: dict[str, Any], answer: Answer, before: int, total: int, last: bool, first: bool) -> bytes:
        ids = answer.ids[before if self.dialect != "cumulative" else 0 : total]
        start = before if self.dialect == "incremental" else 0
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": answer.finish if last else None,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.label(max(total - 1, 0)),
            "num_retractions": 1,
        }
        if body.get("return_logprob"):
            if first or not self.prompt_once:
                meta["input_token_logprobs"] = prompt_rows(body)
            meta["output_token_logprobs"] = answer.logprobs[start:total]
            meta["output_token_logprobs_length"] = total
            if body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = answer.tops[start:total]
        meta |= {"reasoning_tokens": 0, "completion_tokens": total, "cached_tokens": self.cached}
        if last:
            meta["weight_versions"] = self.spans(total)
        meta["cached_tokens_details"] = {"device": self.cached, "host": 0}
        if self.extra:
            meta["a constant list"] = ["x", "y", "z"]
            meta["entropies"] = [one / 1000 for one in answer.ids[start:total]]
        if self.nan:
            meta["odd"] = {"deep": [float("nan"), float("-inf"), "NaN, Infinity"]}
        meta["dp_rank"] = None
        if last:
            meta["e2e_latency"] = 0.25
        if first:
            meta["response_sent_to_client_ts"] = 1_700_000_000.5
        event: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
        if body.get("return_prompt_token_ids"):
            event["prompt_token_ids"] = body["input_ids"]
        return dumps(event)


@dataclass
class Plan:
    """One attempt: the worker, and after how many events it dies (None: it does not)."""

    engine: Engine = field(default_factory=Engine)
    cut: int | None = None
    #: The worker's info tells what it speaks (that the ids are deltas, at least).
    says: bool = False
    #: All its events arrive in one read.
    together: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(incremental=self.engine.dialect != "cumulative", sampling_defaults={}) if self.says else TOLD


@dataclass
class Outcome:
    exchange: SglangExchange
    bodies: list[dict[str, Any]]
    out: bytes
    #: Growing events that attempt 0 delivered.
    shown: int

    @property
    def events(self) -> list[dict[str, Any]]:
        parts = self.out.split(b"\n\n")
        assert parts[-2:] == [b"data: [DONE]", b""], parts[-3:]
        return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]

    @property
    def unary(self) -> dict[str, Any]:
        answer = self.exchange.answer(100.0)
        assert answer.status == 200
        result: dict[str, Any] = json.loads(answer.body)
        return result


def play(body: dict[str, Any], plans: list[Plan], renamed: bool = False) -> Outcome:
    """Run a request over workers that die as planned. Each dispatch is checked against the budget's oracle.

    `renamed`: attempt 0 does not go under the client's own rid.
    """
    exchange = opened(body, plans[0].traits)
    assert exchange.verdict.migratable, exchange.verdict
    bodies, out, now, shown = [], b"", 10.0, 0
    wanted = oracle(body)
    for number, plan in enumerate(plans):
        name = f"try-{number}" if number or renamed else exchange.rid
        sent = exchange.dispatch(plan.traits, name, now)
        assert json.loads(sent.body)["rid"] == name
        bodies.append(json.loads(sent.body))
        check_body(body, bodies[-1], wanted, exchange.delivered)
        assert exchange.head(200, SSE_HEAD) is Reading.EVENTS
        events = plan.engine.events(bodies[-1])
        reads = [events[: plan.cut]] if plan.together else [[event] for event in events[: plan.cut]]
        for read in reads:
            now += 1.0
            out += exchange.feed(read, now)
        if number == 0:
            shown = min(len(events) if plan.cut is None else plan.cut, len(events) - 1)
        assert exchange.end in (None, End.FINISHED), (exchange.end, exchange.detail)
        if exchange.end is None:
            done = exchange.complete(now)
            if done is None:
                continue
            out += done
        return Outcome(exchange, bodies, out, shown)
    raise AssertionError("the last planned worker dies too")


def check_body(asked: dict[str, Any], sent: dict[str, Any], wanted: Answer, delivered: int) -> None:
    params, given = sent.get("sampling_params") or {}, asked.get("sampling_params") or {}
    assert sent["stream"] is True
    assert sent["input_ids"] == asked["input_ids"] + wanted.ids[:delivered]
    if delivered:
        assert params["max_new_tokens"] == given.get("max_new_tokens", 128) - delivered > 0
        assert params.get("min_new_tokens", 0) == max(0, given.get("min_new_tokens", 0) - delivered)
        assert sent.get("logprob_start_len", -1) in (-1, None)
    others = ("input_ids", "rid", "stream", "sampling_params", "logprob_start_len", "text", "kv_hints")
    for name, value in asked.items():
        assert name in others or sent[name] == value


def read_stream(events: list[dict[str, Any]], dialect: str) -> dict[str, Any]:
    """What a client of `dialect` has at the end. Fails if an event does not go on from the one before."""
    ids: list[int] = []
    rows: dict[str, list[Any]] = {}
    for event in events:
        meta = event["meta_info"]
        before = len(ids)
        ids = ids + event["output_ids"] if dialect != "cumulative" else grown(ids, event["output_ids"])
        assert meta["completion_tokens"] == len(ids) >= before
        for name in ("output_token_logprobs", "output_top_logprobs", "entropies"):
            if name in meta:
                old = rows.get(name, [])
                rows[name] = old + meta[name] if dialect == "incremental" else grown(old, meta[name])
                assert len(rows[name]) == len(ids), name
        assert (meta["finish_reason"] is None) == (event is not events[-1])
    return {"ids": ids, "rows": rows, "last": events[-1]}


def grown(old: list[Any], new: list[Any]) -> list[Any]:
    assert new[: len(old)] == old
    return new
