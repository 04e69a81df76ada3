"""What would become of a request: the exchange itself, driven by an engine that says as little as one can."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from itertools import count

from dyn_relay.formats.base import CannotComplete, Event, Explanation, Rejected, Verdict
from dyn_relay.formats.sglang.admission import deciding
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.wire import raw, write
from dyn_relay.formats.traits import Traits

#: Stands for a name that is not known: the model's, or the next attempt's, for which the relay draws a fresh one.
NAME = "stand-in"
#: SGLang 0.5.23 with a tokenizer, cumulative streams and no `--preferred-sampling-params`.
STOCK = Traits(version="0.5.23", model=NAME, text=True, incremental=False, sampling_defaults={})

#: So many tokens are made up at most: the ids of that many are some MB of JSON.
MOST = 1 << 20

_HEAD = [(b"content-type", b"text/event-stream")]
_DEFAULTS = "its `preferred_sampling_params` count like the client's own parameters, where the client gave none"
_WHOLE = "what cannot be spread over the answers with certainty is for the engine to see as the client wrote it"
#: What a worker may not say, in words.
_SILENCES: tuple[tuple[str, dict[str, None]], ...] = (
    ("does not say which release it is", {"version": None}),
    ("does not say its `preferred_sampling_params`", {"sampling_defaults": None}),
)


def refused(exc: Rejected) -> Explanation:
    """Of a request that no worker sees."""
    rule = f"`{exc.reason}`: refused at once, in the engine's words"
    return Explanation(
        Verdict(exc.reason), rule, "it is known to kill a stock engine, or to wedge it", answer=exc.answer
    )


def explain(exchange: SglangExchange, traits: Traits, ends: Set[int], after: int) -> Explanation:
    """See `Format.explain`. `ends`: token ids that are known to end answers.

    Raises `ValueError`.
    """
    request = exchange.request
    spare = next(one for one in count() if one not in ends | request.stop_ids)
    depends = (_DEFAULTS, *_silent(exchange, traits))
    verdict = exchange.admit(traits)
    found = Explanation(verdict, lacks=exchange.lacks(traits), prompt_tokens=exchange.prompt_tokens, depends=depends)
    if exchange.unsplit and verdict.reason == exchange.unsplit:
        rule = f"`{verdict.reason}`: with it a request for several answers is not split"
        return replace(found, rule=rule, because=_WHOLE)
    row = deciding(request, traits)
    if row is not None:
        rule = f"`{row.field}` ({row.where}): refused if {row.when}"
        return replace(found, rule=rule, because=row.why)
    budget = request.max_new_tokens or 0
    if after > min(budget, MOST):
        limit = f"the request's {budget} tokens" if budget <= MOST else f"{MOST}, which is enough to see"
        raise ValueError(f"after: must be at most {limit}, not {after}")
    exchange.dispatch(traits, exchange.rid, 0.0)
    exchange.head(200, _HEAD)
    if after:
        exchange.feed([_event(exchange.rid, request, traits, [spare] * after)], 0.0)
    found = replace(found, prompt_tokens=exchange.prompt_tokens)
    try:
        if exchange.complete(0.0) is not None:
            return replace(found, instead="nothing would be left to generate: the relay would finish it")
        needs = exchange.demands()
        continuation = exchange.dispatch(traits, NAME, 0.0)
    except CannotComplete as exc:
        return replace(found, instead=f"it would fail loudly, with the reason {exc.reason}")
    stand_ins = _stand_ins(request, traits, spare, after)
    return replace(found, continuation=continuation, needs=needs, stand_ins=stand_ins)


def _silent(exchange: SglangExchange, traits: Traits) -> tuple[str, ...]:
    usual = exchange.admit(traits)
    others = ((words, exchange.admit(replace(traits, **nothing))) for words, nothing in _SILENCES)
    return tuple(
        f"if it {words}: {f'no; reason={other.reason}' if other.reason else 'yes'}"
        for words, other in others
        if other != usual
    )


def _event(rid: str, request: Request, traits: Traits, ids: list[int]) -> Event:
    """What an engine has said after so many tokens. Its text is empty: nothing but the ids goes into a continuation."""
    meta = {"id": rid, "finish_reason": None, "completion_tokens": len(ids)}
    fields = {"output_ids": raw(ids), "meta_info": raw(meta)}
    if traits.text:
        fields["text"] = raw("")
    if request.by_text:
        fields["prompt_token_ids"] = raw(ids[:1])
    data = write(fields)
    return b"data: " + data + b"\n\n", data


def _stand_ins(request: Request, traits: Traits, spare: int, after: int) -> tuple[str, ...]:
    found = [f"rid: {NAME!r} stands for a fresh name"]
    if after and traits.text is None:
        found.append("text: the first worker does not say whether it answers with text; as if it did not")
    if after:
        found.append(f"input_ids: the last {after}, all {spare}, stand for what the first worker would have generated")
    if request.by_text:
        found.append(f"needs: the tokens of the text are not counted here; it is taken for {request.prompt_tokens}")
    if after and request.by_text:
        found.append(f"input_ids: the first one, {spare}, stands for all those of the text, which the engine tells")
    return tuple(found)
