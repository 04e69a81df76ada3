"""The laws, for SGLang's `/generate`: what must be exact about a router that lets generations outlive their workers.

Each is a plain function of what was observed. It returns if the law holds and raises `AssertionError` with the whole
story if it does not. `Oracle` is the second opinion on what an uninterrupted run would have given; it must know the
workers' model. Where a law says something about tokens alone, it begins with the one in `tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dyn_testkit.client import Response
from dyn_testkit.laws import tokens
from dyn_testkit.laws.answers import DIALECTS, folded, httpx_reads, misspelt, read_answer, sample
from dyn_testkit.laws.numbers import left_of
from dyn_testkit.laws.observed import Attempt, Observed
from dyn_testkit.laws.tokens import require as _require
from dyn_testkit.laws.wire import Reading
from dyn_testkit.oracle import MEASURED, PER_TOKEN, Oracle, differences
from dyn_testkit.worker import Dialect

#: The response header that says whether a request is rescued.
MIGRATABLE_HEADER = "x-dyn-relay-migratable"
#: Prompt metadata that depends on the attempt that computed it.
_FIRST_ATTEMPT = ("cached_tokens", "cached_tokens_details")
#: What a stream tells with its finish only.
_LAST = ("weight_versions", "routed_experts", "indexer_topk")
#: Bytes of a body that are shown from where it is wrong.
_SHOWN = 60
#: SGLang cuts off nothing, but logs and headers carry rids: none of ours is longer.
MAX_RID = 128


def uninterrupted(seen: Observed, oracle: Oracle) -> Reading:
    """What the oracle makes of a request, for the laws about tokens."""
    answer = oracle.answer(seen.request)
    return Reading(answer["output_ids"], answer["meta_info"]["finish_reason"], complete=True)


def equivalence(seen: Observed, oracle: Oracle) -> None:
    """The client's answer is the uninterrupted one, but for the fields that are measured.

    A unary answer field by field; a stream event by event: in one dialect from its first event to its last, each event
    a true prefix (or delta) of the oracle's answer, the finish in the last one, then `[DONE]` and complete framing.
    """
    law, response = "equivalence", seen.response
    _require(response.status == 200, law, seen, f"status {response.status}")
    _require(response.complete, law, seen, f"the answer broke off: {response.broken}")
    wanted = oracle.answer(seen.request)
    if not seen.case.streaming:
        wrong = differences(response.json(), wanted)
        _require(not wrong, law, seen, "; ".join(wrong))
        return
    events = response.events()
    crlf = "; its lines end with CRLF, SGLang's with LF" if b"\r\n\r\n" in response.body else ""
    _require(bool(events) and events[-1] == b"[DONE]", law, seen, f"no [DONE] at the end{crlf}")
    values = response.values()
    _require(len(values) == len(events) - 1, law, seen, "[DONE] in the middle")
    errors = [value["error"] for value in values if "error" in value]
    _require(not errors, law, seen, f"an error: {errors}")
    stories = {dialect: _read_as(values, wanted, dialect) for dialect in DIALECTS}
    if all(stories.values()):
        first = seen.attempts[0].dialect if seen.attempts else None
        _require(False, law, seen, stories[first or DIALECTS[0]])


def _read_as(values: list[dict[str, Any]], wanted: Mapping[str, Any], dialect: Dialect) -> str:
    """What is wrong with a stream if it is spoken in `dialect`; "" for nothing."""
    before, text = 0, ""
    name = values[0]["meta_info"]["id"]
    for at, value in enumerate(values):
        meta = value["meta_info"]
        total = meta["completion_tokens"]
        wrong = misspelt(values, at, dialect)
        if wrong or total < before:
            return wrong or f"event {at}: completion_tokens went back from {before} to {total}"
        expected = _event(wanted, before, total, dialect, last=at == len(values) - 1)
        expected["meta_info"].setdefault("id", name)
        if "text" in value and "text" in wanted:
            text = value["text"] if dialect == "cumulative" else text + value["text"]
            # How much of it is told when hangs on where characters end; none is taken back.
            if not wanted["text"].startswith(text):
                return f"event {at}, read as {dialect}: text {text!r}, want {wanted['text']!r}"
            expected["text"] = value["text"]
        found = differences(value, expected)
        if found:
            return f"event {at}, read as {dialect}: {'; '.join(found)}"
        before = total
    if text != wanted.get("text", ""):
        return f"read as {dialect}: the text ends with {text[-20:]!r}, not with {wanted['text'][-20:]!r}"
    return ""


def _event(wanted: Mapping[str, Any], before: int, total: int, dialect: Dialect, *, last: bool) -> dict[str, Any]:
    """The event that takes an uninterrupted stream from `before` to `total` tokens."""
    meta = dict(wanted["meta_info"])
    for name in PER_TOKEN:
        if name in meta:
            meta[name] = meta[name][before if dialect == "incremental" else 0 : total]
    meta["completion_tokens"] = total
    if "output_token_logprobs_length" in meta:
        meta["output_token_logprobs_length"] = total
    if not last:
        meta["finish_reason"] = None
        for name in _LAST:
            meta.pop(name, None)
    ids = wanted["output_ids"][0 if dialect == "cumulative" else before : total]
    return {**wanted, "output_ids": ids, "meta_info": meta}


def admission(seen: Observed, reason: str) -> None:
    """A request is continued if and only if nothing in it forbids that; the response says which, and the field.

    `reason` is the field that forbids it, "" for none. A forbidden request is never continued: what a worker gets of it
    is always the client's own body, and none gets it once another has begun to answer; if that one dies, the client is
    told.
    """
    law, response = "admission", seen.response
    told = response.header(MIGRATABLE_HEADER)
    wanted = f"no; reason={reason}" if reason else "yes"
    _require(told == wanted, law, seen, f"{MIGRATABLE_HEADER} is {told!r}, not {wanted!r}")
    if not reason:
        return
    for number, attempt in enumerate(seen.attempts):
        _require(attempt.body == seen.case.body, law, seen, f"attempt {number} is not what the client sent")
        _require(not number or not _began(seen.attempts[number - 1]), law, seen, "continued, though it must not be")
    _require_told(law, seen)


def never_continued(seen: Observed) -> None:
    """The part of `admission` that asks nothing of a router but HTTP, for a request that must not be continued.

    Whatever a worker gets has the client's own prompt and budget; once a stream has begun no other worker gets it; if
    its worker dies, the client is told. (What was not shown to the client may be begun again elsewhere.)
    """
    law = "admission"
    for number, attempt in enumerate(seen.attempts):
        wanted, got = ([_asked(value).get(name) for name in _MOVED] for value in (seen.request, attempt.sent))
        _require(got == wanted, law, seen, f"attempt {number} does not ask for what the client asked")
        again = number > 0 and seen.case.streaming and _began(seen.attempts[number - 1])
        _require(not again, law, seen, "continued, though it must not be")
    _require_told(law, seen)


#: What a continuation moves.
_MOVED = ("input_ids", "text", "input_embeds", "max_new_tokens")


def _asked(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, **(value.get("sampling_params") or {})}


def _require_told(law: str, seen: Observed) -> None:
    """If the last worker died, the client knows."""
    if seen.attempts and not _ended(seen.attempts[-1], seen):
        loud = seen.response.status >= 500 or not seen.response.complete
        _require(loud, law, seen, "its worker died, and the client was not told")


def _began(attempt: Attempt) -> bool:
    """Something of an answer, not only its head, was sent."""
    return bool(attempt.answer.body)


def _ended(attempt: Attempt, seen: Observed) -> bool:
    """The worker sent all of an answer, but for what only says that it is over."""
    answer, streaming = attempt.answer, seen.case.streaming
    events = answer.events() if streaming else []
    if answer.complete or b"[DONE]" in events or any(data.startswith(b'{"error":') for data in events):
        return True
    ids = seen.request.get("input_ids") or [0]
    alone = (seen.request.get("sampling_params") or {}).get("n", 1) <= 1 and isinstance(ids[0], int)
    return alone and sample(answer, streaming=streaming) is not None


def budget(seen: Observed, oracle: Oracle, *, own: bool = True) -> None:
    """No continuation asks for more than is left, and an exhausted request makes no call.

    Recomputed from what the workers got: a continuation's prompt is the client's and the first tokens of the answer,
    its budgets are what these leave, its rid is related to no other attempt's, and the rest is the client's own.
    `own` False: of a router that writes requests anew, where names and fields that nobody set are its own business.
    """
    law, request = "budget", seen.request
    tokens.budget(seen, uninterrupted(seen, oracle), own=own)
    for number, attempt in enumerate(seen.attempts):
        sent, taken = attempt.sent, seen.resumed(number)
        what = f"attempt {number}"
        limits = left_of(request.get("sampling_params") or {}, taken)
        asked = {name: sent["sampling_params"].get(name) for name in limits}
        _require(not taken or asked == limits, law, seen, f"{what} asks for {asked}, {limits} is left")
        if taken and request.get("logprob_start_len") is not None:
            _require(sent["logprob_start_len"] == -1, law, seen, f"{what} asks for the prompt's logprobs again")
    if own:
        _require_names(law, seen)


def _require_names(law: str, seen: Observed) -> None:
    """No attempt's rid is related to another's, and the trace has them all."""
    names: list[str] = []
    for number, attempt in enumerate(seen.attempts):
        if seen.redialled(number):
            continue
        what, rid = f"attempt {number}", attempt.sent["rid"]
        related = [name for name in names if name.startswith(rid) or rid.startswith(name)]
        _require(not related, law, seen, f"{what}'s rid {rid!r} is related to {related}")
        _require(len(rid.encode()) <= MAX_RID or not number, law, seen, f"{what}'s rid is too long")
        names.append(rid)
    if seen.rows and len(seen.rows) == 1:
        told = [row["resumed_from"] for row in seen.rows[0]["attempts"] if row["rid"] in names]
        found = [seen.resumed(number) for number in range(len(seen.attempts)) if not seen.redialled(number)]
        _require(told == found, law, seen, f"the trace says that attempts resumed from {told}, they did from {found}")


def snapshot(seen: Observed) -> None:
    """Prompt metadata is that of the attempt that first gave the client something, however many follow."""
    law, request = "snapshot", seen.request
    if not seen.response.complete or seen.response.status != 200:
        return
    values = seen.response.values() if seen.case.streaming else [seen.response.json()]
    untold = [number for number in range(len(seen.attempts)) if not seen.resumed(number)]
    # A pair that is asked for the rows of an answer of one token makes it again, and looks as if it had begun it.
    one = (request.get("sampling_params") or {}).get("max_new_tokens") == 1 and bool(seen.prefills)
    told = [_wanted(seen, number) for number in (untold if one else untold[-1:])]
    metas = [value["meta_info"] for value in values]
    wanted = next((one for one in told if all(_says(meta, one) for meta in metas)), told[-1])
    for at, value in enumerate(values):
        meta = value["meta_info"]
        wrong = {name: meta.get(name) for name in wanted if meta.get(name) != wanted[name]}
        _require(not wrong, law, seen, f"event {at} says {wrong} of the prompt, attempt {untold[-1]} said {wanted}")
        named = request.get("rid", values[0]["meta_info"]["id"])
        _require(meta["id"] == named, law, seen, f"event {at} is called {meta['id']!r}, not {named!r}")


def _wanted(seen: Observed, number: int) -> dict[str, Any]:
    """What of the prompt an attempt has told, that the client must be told."""
    source = _first_meta(seen.attempts[number])
    leg = seen.prefill_of(number)
    if leg is not None:  # of a pair, only the prefill worker knows the prompt's logprobs
        source |= {name: value for name, value in _first_meta(leg).items() if name.startswith("input_")}
    wanted: dict[str, Any] = {"prompt_tokens": len(seen.request["input_ids"])}
    return wanted | {name: source[name] for name in source if name in _FIRST_ATTEMPT or name.startswith("input_")}


def _says(meta: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(meta.get(name) == value for name, value in wanted.items())


def _first_meta(attempt: Attempt) -> dict[str, Any]:
    """The `meta_info` of the first event that an attempt's worker sent whole."""
    for data in attempt.answer.events():
        try:
            meta: dict[str, Any] = json.loads(data)["meta_info"]
        except (ValueError, KeyError):
            continue
        return meta
    return {}


def fold(unary: Observed, stream: Observed) -> None:
    """A unary answer is the fold of the stream for the same request, in every dialect and every chunking.

    Both must have come to their end. The requests are the same but for `stream`.
    """
    law = "fold"
    for seen in (unary, stream):
        _require(seen.response.complete and seen.response.status == 200, law, seen, "no complete answer")
    whole, total = unary.response.json(), folded(stream.response)
    if "rid" not in unary.request:
        total["meta_info"].pop("id")
    wrong = differences(whole, total | {"meta_info": _settled(total["meta_info"])})
    _require(not wrong, law, unary, f"unary and folded stream differ: {'; '.join(wrong)}\n{stream}")
    _require(list(whole) == list(total), law, unary, f"keys in another order than the stream's\n{stream}")


def _settled(meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta_info` without what is measured: `differences` looks away only on one side."""
    return {name: value for name, value in meta.items() if name not in MEASURED}


def passthrough(seen: Observed, *, rewritten: bool) -> None:
    """With no fault the client's bytes are the worker's, and the worker's the client's.

    One attempt. The client's body is what the worker sent, byte for byte, and what the worker got is what the client
    sent. `rewritten`: the router had to give the request a name or turn it into a stream, so the second does not count;
    of a unary request that was turned into a stream, neither does. A request on which a worker fails by itself (stock
    does, on an exception: 500, or a stream that breaks off) must be seen to have failed.
    """
    law = "passthrough"
    _require(len(seen.attempts) == 1, law, seen, f"{len(seen.attempts)} attempts, status {seen.response.status}")
    attempt = seen.attempts[0]
    if not rewritten:
        _require(attempt.body == seen.case.body, law, seen, "the worker did not get what the client sent")
    if not rewritten or seen.case.streaming:
        verbatim(seen)


def verbatim(seen: Observed) -> None:
    """The part of `passthrough` about the answer of the only attempt."""
    law = "passthrough"
    answer = seen.attempts[0].answer
    # Whoever has [DONE] may hang up: what would come is the last chunk.
    whole = answer.complete or (seen.case.streaming and answer.events()[-1:] == [b"[DONE]"])
    if not whole or (answer.status >= 500 and not seen.response.complete):
        loud = seen.response.status >= 500 or not seen.response.complete
        _require(loud, law, seen, "the worker failed by itself, and its client does not see it")
        return
    _require(seen.response.status == answer.status, law, seen, f"the worker said {answer.status}")
    same = seen.response.body == answer.body
    _require(same, law, seen, f"the body is not the worker's\n  {_parting(answer.body, seen.response.body)}")
    sent, kind = (said.header("content-type") or "" for said in (answer, seen.response))
    _require(_media_type(kind) == _media_type(sent), law, seen, f"the content type {sent!r} became {kind!r}")


def _parting(sent: bytes, got: bytes) -> str:
    """Where two bodies part, and how they go on."""
    pairs = enumerate(zip(sent, got, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(sent), len(got)))
    return f"at byte {at} the worker sent {sent[at : at + _SHOWN]!r}, the client got {got[at : at + _SHOWN]!r}"


def _media_type(header: str) -> list[str]:
    """A content type, however it is spelled."""
    return [part.strip().lower() for part in header.split(";")]


def no_false_success(seen: Observed, oracle: Oracle, *, loud: bool = True) -> None:
    """A truncated answer never parses as a complete one; a failed one says how much was delivered.

    For a careless client (`answers.sample`) whose HTTP library is h11 or httpx: whatever it takes for a finished sample
    has all the tokens of the oracle's. A stream that failed carries one error event, no `[DONE]`, and broken framing.
    `loud` False: of a router that promises no more than the broken framing.
    """
    law, response, streaming = "no false success", seen.response, seen.case.streaming
    tokens.no_false_success(seen, uninterrupted(seen, oracle))
    if response.status != 200:
        _require(not loud or response.status >= 500, law, seen, f"a failure with status {response.status}")
    elif streaming and response.complete:
        _require(response.events()[-1:] == [b"[DONE]"], law, seen, "complete framing around a stream without [DONE]")
        last = response.values()[-1]
        ended = "error" in last or last["meta_info"]["finish_reason"] is not None
        _require(ended and not ("error" in last and _shown(response)), law, seen, "[DONE] after part of an answer")
    elif streaming and loud:
        _loud(law, seen)


def _shown(response: Response) -> int:
    """Tokens that a stream's events have shown."""
    values = response.values()
    return max((value["meta_info"]["completion_tokens"] for value in values if "meta_info" in value), default=0)


def _loud(law: str, seen: Observed) -> None:
    """A broken stream says once, and last, that it failed and how much was delivered."""
    response = seen.response
    values = response.values()
    errors = [value["error"] for value in values if "error" in value]
    _require(len(errors) == 1 and values[-1] == {"error": errors[0]}, law, seen, f"error events: {errors}")
    _require(b"[DONE]" not in response.events(), law, seen, "[DONE] after a failure")
    _require(sample(response, streaming=True) is None, law, seen, "finished, for a client that ignores framing")
    told, shown = errors[0].get("delivered"), _shown(response)
    _require(told == shown, law, seen, f"{told} tokens delivered, it says; {shown} were")


def truncation(seen: Observed, oracle: Oracle, kept: int) -> None:
    """The same, when the client's own connection breaks after `kept` bytes: the answer's framing shows it."""
    wire = seen.response.wire[:kept]
    for library, reading in (("h11", read_answer(wire)), ("httpx", httpx_reads(wire))):
        complete = reading is not None and reading.complete
        shorter = kept < len(seen.response.wire)
        _require(not (complete and shorter), "no false success", seen, f"{library} is content with {kept} bytes")


def exactly_once(seen: Observed) -> None:
    """One trace row, one lease release an attempt, at most one live attempt.

    Needs the router's rows and gauges. The row's attempts are those that workers saw, one after the other, and their
    tokens are the ones that the client got; whatever counts things in flight is back at 0.
    """
    law = "exactly once"
    tokens.exactly_once(seen)
    if seen.rows is None or seen.gauges is None:
        raise AssertionError(f"{law}: the router shows neither rows nor gauges")
    _require(len(seen.rows) == 1, law, seen, f"{len(seen.rows)} trace rows")
    row = seen.rows[0]
    dispatched = [attempt.sent["rid"] for attempt in seen.attempts if "rid" in attempt.sent]
    listed = [attempt["rid"] for attempt in row["attempts"]]
    _require(set(dispatched) <= set(listed), law, seen, f"the row lists {listed}, workers saw {dispatched}")
    for one, two in zip(row["attempts"], row["attempts"][1:], strict=False):
        _require(one["ended"] <= two["started"], law, seen, f"two attempts at the same time: {one} and {two}")
    given, told = sum(attempt["tokens"] for attempt in row["attempts"]), row["completion_tokens"]
    _require(given == told, law, seen, f"{told} tokens, attempts gave {given}")
    busy = {name: value for name, value in seen.gauges.items() if value}
    _require(not busy, law, seen, f"still in flight: {busy}")
