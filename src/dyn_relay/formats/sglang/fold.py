"""Answers that no single event holds: the unary body made from a stream, and a finish made without a worker."""

from __future__ import annotations

from msgspec import Raw

from dyn_relay.formats.sglang.answer import IDS, Rule, rule
from dyn_relay.formats.sglang.dialect import Dialect
from dyn_relay.formats.sglang.request import ABSENT, Request
from dyn_relay.formats.sglang.spans import Span, known, render
from dyn_relay.formats.sglang.wire import NULL, Fields, is_list, raw, read_rows, write

SENT = "response_sent_to_client_ts"

#: The finish reasons of SGLang 0.5.23 for a request that is aborted while it runs, and while it waits.
ABORTED: dict[str, object] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE: dict[str, object] = {"type": "abort", "message": "Abort in waiting queue"}

_NOTHING = Raw(b"[]")
#: Fields of a request that ask for more lists of logprobs, and what these are called.
_LISTS = (("top_logprobs_num", "top"), ("token_ids_logprob", "token_ids"))


def unary(body: Fields, meta: Fields, sent: float | None) -> bytes:
    """A unary answer from the last event's cumulative view, in stock's order of keys.

    `sent` is the engine's wall clock now: stock puts it last.
    """
    ordered = {name: value for name, value in meta.items() if name != SENT}
    if sent is not None:
        ordered[SENT] = raw(sent)
    return write(body, ordered)


def finish(
    template: tuple[Fields, Fields],
    reason: dict[str, object],
    spans: list[Span],
    latency: float,
    dialect: Dialect,
    last_delta: int,
    rows: Fields,
) -> tuple[Fields, Fields]:
    """The finish that a worker did not live to send, from the newest event in the client's view: nothing new in it.

    But for `rows`, which stock tells with the finish only.
    """
    meta: Fields = {}
    for name, value in template[1].items():
        if name == SENT:
            continue
        if name == "dp_rank":
            meta.update(rows)
        meta[name] = value
        if name == "finish_reason":
            meta[name] = raw(reason)
        elif dialect.rows_are_deltas and _is_delta(name, value, last_delta):
            meta[name] = _NOTHING
        if name == "cached_tokens" and spans and known(spans):
            meta["weight_versions"] = render(spans)
    meta.update(rows)
    meta["e2e_latency"] = raw(latency)
    body = dict(template[0])
    if dialect.ids_are_deltas:
        body[IDS] = _NOTHING
        if "text" in body:
            body["text"] = raw("")
    return body, meta


def abort_echo(request: Request, rid: str, version: str | None) -> tuple[Fields, Fields]:
    """What the engine says of a request that it drops before it ran: no prompt metadata, always a `text`.

    `version`: that of the weights it would have met, if known.
    """
    meta: Fields = {"id": raw(rid), "finish_reason": NULL}
    if version is not None:
        meta |= {"weight_version": raw(version), "e2e_latency": NULL, "weight_versions": render([Span(version, 0, 0)])}
    if request.asks("return_logprob"):
        lists = ["token", *(name for field, name in _LISTS if request.value(field) not in (ABSENT, None, 0))]
        meta |= {f"{side}_{name}_logprobs": _NOTHING for name in lists for side in ("input", "output")}
        meta["output_token_logprobs_length"] = raw(0)
    meta["completion_tokens"] = raw(0)
    return {"text": raw(""), IDS: _NOTHING, "meta_info": NULL}, meta


def _is_delta(name: str, value: Raw, last_delta: int) -> bool:
    kind = rule(name)
    if not is_list(value) or not (kind is Rule.ROWS or kind is None):
        return False
    return kind is Rule.ROWS or len(read_rows(value)) == last_delta
