"""The body of each attempt: the client's own, or "prompt + what was delivered" with what is left of its budget."""

from __future__ import annotations

from array import array
from functools import lru_cache

from msgspec import Raw

from dyn_relay.formats.sglang.request import DEFAULT_MAX_NEW_TOKENS, Request
from dyn_relay.formats.sglang.wire import NULL, TRUE, Fields, inside, joined, raw
from dyn_relay.formats.traits import Traits

#: The first release whose `sampling_params` are known to take `stream_interval`; an unknown key there is a 400.
_INTERVAL_SINCE = (0, 5, 23)

#: The release whose way to make text of tokens `seam.py` follows; what older ones tell with deltas is not known.
_DETOKENIZER = (0, 5, 23)

#: Events that a unary answer from a cumulative worker comes in: each repeats what was, so n of them are n/2 answers.
_CUMULATIVE_EVENTS = 15

#: Tokens an event, at least; that many are generated again sooner than they are worth an event. From an incremental
#: worker no more either: deltas cost nothing but their frames.
_LEAST_INTERVAL = 32

#: Worker-specific: never sent to another worker. A rank number means nothing on an engine with other ranks.
RANKS = frozenset({"routed_dp_rank", "data_parallel_rank"})
#: What says where a request is to run.
PLACES = RANKS | {"disagg_prefill_dp_rank"}
BOUND_TO_WORKER = frozenset({"kv_hints"}) | RANKS
#: The first release of which `routed_dp_rank` is known.
_ROUTED_SINCE = (0, 5, 19)

#: What else of a request is changed, and how; the client's own bytes stay where nothing is.
REWRITTEN: dict[str, str] = {
    "rid": "the client's own for the first attempt (one is made if it gave none), a fresh one for each later one",
    "text": "left out of continuations, whose prompt is ids; one that is the prompt makes the engine tell its ids",
    "input_ids": "in continuations followed by the tokens that were delivered",
    "sampling_params": "its budgets are reduced, see below",
    "logprob_start_len": "-1 in continuations: the client has the prompt's logprobs",
    "stream": "true: only a stream shows progress; a unary answer is the fold of it",
    "return_prompt_token_ids": "true if the prompt is a text; the client gets them only if it asked",
}
REWRITTEN_SAMPLING: dict[str, str] = {
    "max_new_tokens": "in continuations less the tokens that were delivered, of the default if it is absent",
    "min_new_tokens": "in continuations less the tokens that were delivered, if it is there or has a default",
    "stream_interval": "for a unary client that gave none: coarse, where the release knows it",
}

#: So that a prompt which is a text can be continued.
_ASKED: Fields = {"return_prompt_token_ids": TRUE}

#: SGLang 0.5.23: a worker's `max_req_input_len` is so many tokens below its context length, and so many below the
#: longest sequence that it generates.
_BELOW_CONTEXT, _BELOW_LONGEST = 6, 4


def remaining(max_new_tokens: int, min_new_tokens: int, delivered: int) -> tuple[int, int]:
    """(max, min) new tokens left after `delivered`; neither below 0, min never above max."""
    left = max(max_new_tokens - delivered, 0)
    return left, min(max(min_new_tokens - delivered, 0), left)


@lru_cache
def release(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version, () if unknown."""
    numbers = []
    for part in (version or "").split("."):
        digits = part[: next((i for i, char in enumerate(part) if not char.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def detokenizes(traits: Traits) -> bool:
    """Is it known how the worker makes text of tokens?"""
    return release(traits.version) >= _DETOKENIZER


def interval(request: Request, traits: Traits, delivered: int) -> int:
    """Tokens between two events that a worker is asked for: the client's choice, ours for unary clients, 0 if none."""
    asked = request.number("stream_interval", 0)
    if request.stream or asked:
        return max(asked or 0, 0)
    if release(traits.version) < _INTERVAL_SINCE or "stream_interval" in request.sampling:
        return 0
    if traits.incremental:
        return _LEAST_INTERVAL
    left, _ = remaining(request.max_new_tokens or 0, 0, delivered)
    return max(-(-left // _CUMULATIVE_EVENTS), _LEAST_INTERVAL)


def placed(traits: Traits, rank: int | None) -> Fields:
    """What sends a request to a rank; {} for none.

    The field was called `data_parallel_rank` first (SGLang's pull request 6884, 2025). 0.5.23 still takes that name, if
    the new one is missing; 0.5.19 is the oldest release that is known to take the new one (pull request 38729).
    """
    if rank is None:
        return {}
    return {"routed_dp_rank" if release(traits.version) >= _ROUTED_SINCE else "data_parallel_rank": raw(rank)}


def whole(request: Request, place: Fields) -> bytes:
    """Any attempt of a request that is not migratable: the client's body, at a `place`, unless it is no JSON."""
    return request.given(place, _replaced(place)) if request.fields else request.body


def first(request: Request, traits: Traits, rid: str, place: Fields) -> bytes:
    """Attempt 0: a stream's body byte for byte if it has this `rid`, else with it; a unary one turned into a stream.

    A text's ids are asked for. `place`: what says where it is to run, instead of the client's own fields.
    """
    fields = dict(place)
    drop = _replaced(place)
    if request.rid != rid or not request.stream:
        fields["rid"] = raw(rid)
    if request.stream and not request.hides_prompt:
        return request.given(fields, drop)
    fields |= {"stream": TRUE, "rid": raw(rid), **(_ASKED if request.hides_prompt else {})}
    return request.edited(fields, _paced(request, traits, 0), drop)


def later(request: Request, traits: Traits, rid: str, ids: array[int], place: Fields) -> bytes:
    """Any other attempt: the original request while nothing was delivered, a continuation from then on."""
    fields: Fields = {"stream": TRUE, "rid": raw(rid), **place}
    sampling = _paced(request, traits, len(ids))
    if not ids:
        if request.hides_prompt:
            fields |= _ASKED
        return request.edited(fields, sampling, BOUND_TO_WORKER)
    fields["input_ids"] = _sequence(request, ids)
    budget = request.max_new_tokens
    most, least = remaining(
        DEFAULT_MAX_NEW_TOKENS if budget is None else budget,
        request.min_new_tokens,
        len(ids),
    )
    if "max_new_tokens" not in request.sampling and traits.max_input is not None:
        # The engine shortens a budget of its own to what the context holds; one that is asked for it refuses.
        most = min(most, max(traits.max_input + _BELOW_CONTEXT - request.prompt_tokens - len(ids), 0))
        least = min(least, most)
    sampling["max_new_tokens"] = raw(most)
    if request.min_new_tokens or "min_new_tokens" in request.sampling:
        sampling["min_new_tokens"] = raw(least)
    if bytes(request.fields.get("logprob_start_len", NULL)) not in (b"null", b"-1"):
        # The client has them already, and asking again would forbid the worker to reuse its cached prefix.
        fields["logprob_start_len"] = Raw(b"-1")
    return request.edited(fields, sampling, BOUND_TO_WORKER | {"text"})


def rows_alone(request: Request, rid: str, ids: array[int], place: Fields, *, budget: int = 0) -> bytes:
    """For the rows to replay of an answer that has all its tokens: nothing is generated that anybody wants.

    Of a budget of 0 SGLang 0.5.23 goes through the prompt, and tells its rows but the last, as of any other sequence.
    A pair cannot but make one token: there the last one is made again (`budget` 1), and the rows are the same.
    """
    prompt = _sequence(request, ids[: len(ids) - budget])
    fields: Fields = {"stream": TRUE, "rid": raw(rid), "input_ids": prompt, "return_logprob": raw(False)}
    fields |= place
    sampling: Fields = {"max_new_tokens": raw(budget), "min_new_tokens": raw(0)}
    return request.edited(fields, sampling, BOUND_TO_WORKER | {"text"})


def ends_apart(request: Request, one: Traits, other: Traits) -> bool:
    """Would the request's answer end at the context limit of one of two workers, and elsewhere on the other?"""
    if one.max_input is None or other.max_input is None or one.max_input == other.max_input:
        return False
    return ample(request) > min(one.max_input, other.max_input)


def ample(request: Request) -> int:
    """The least `max_req_input_len` whose context limit the request's answer cannot reach."""
    most = DEFAULT_MAX_NEW_TOKENS if request.max_new_tokens is None else request.max_new_tokens
    return request.prompt_tokens + most - _BELOW_LONGEST


def holds(request: Request, traits: Traits) -> bool:
    """Has the worker said nothing that forbids the prompt, or prompt and asked-for budget together?"""
    if traits.max_input is None:
        return True
    asked = (request.max_new_tokens or 0) if "max_new_tokens" in request.sampling else 0
    return (
        request.prompt_tokens <= traits.max_input and request.prompt_tokens + asked <= traits.max_input + _BELOW_CONTEXT
    )


def _replaced(place: Fields) -> frozenset[str]:
    """What of the client's own does not stand beside a `place`: if that names ranks, whichever it named itself."""
    return PLACES if PLACES & place.keys() else frozenset()


def _sequence(request: Request, ids: array[int]) -> Raw:
    return joined([inside(request.prompt or NULL), inside(raw(ids.tolist()))])


def _paced(request: Request, traits: Traits, delivered: int) -> Fields:
    if request.stream:
        return {}
    chosen = interval(request, traits, delivered)
    return {"stream_interval": raw(chosen)} if chosen and not request.number("stream_interval", 0) else {}
