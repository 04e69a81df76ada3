"""What a router is put through: requests and the faults of their attempts, every hard place of an answer among them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from dyn_testkit import faults
from dyn_testkit.engine import Sampling, generate
from dyn_testkit.faults import What, Where
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.observed import Case, Planned
from dyn_testkit.simnet import WHOLE, Fragmentation

#: More attempts than any router makes of one request.
_ALL = 64


@dataclass(frozen=True, slots=True)
class Trial:
    """A case, and the field of its request that forbids a continuation ("" for none)."""

    case: Case
    reason: str = ""
    #: No worker would take it: a router may say so itself.
    invalid: bool = False
    #: Requests that are sent at the same time.
    beside: tuple[Case, ...] = ()
    #: The client goes away when the fault has happened.
    leaves: bool = False


_SAMPLING: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0}
_PLAIN: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": _SAMPLING}
#: A prompt that no worker has died of: a router may remember.
_UNTOUCHED: dict[str, Any] = {"input_ids": [5, 6, 8], "sampling_params": _SAMPLING}
#: One token, nothing else: what a healthy router and any worker answer.
PROBE = Case(json.dumps({"input_ids": [9], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).encode())

_PLACES: tuple[tuple[Where, What], ...] = (
    (faults.at_token(1), faults.RESET),
    (faults.at_token(5), faults.CLOSE),
    (faults.at_token(8), faults.RESET),
    (faults.inside_json(6, 300), faults.RESET),
    (faults.AT_HEAD, faults.RESET),
    (faults.AT_HEAD, faults.KILL_WORKER),
    (faults.at_token(3), faults.KILL_WORKER),
    (faults.AT_HEAD, faults.status(500)),
    (faults.AT_HEAD, faults.status(503)),
    (faults.at_token(4), faults.abort_event(500)),
)
#: Fields that a continuation must repeat, with values that are easily lost or spoiled on the way.
_REPEATED: dict[str, Any] = {
    "rid": "e",
    "return_logprob": True,
    "top_logprobs_num": 2,
    "token_ids_logprob": [4, 39],
    "return_prompt_token_ids": True,
    "lora_path": "adapter",
    **some.STRANGE,
    "priority": -3,  # within what a typed router takes
}
_SAMPLED: dict[str, Any] = {
    "max_new_tokens": 9,
    "min_new_tokens": 7,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "sampling_seed": 2**63 - 1,
    "logit_bias": {"3": 1.5},
    "ignore_eos": True,
}
#: Requests at a time.
_CROWD = 6
#: How bytes are cut on their way: into many pieces, or now and then.
_SMALL, _HALVES = Fragmentation(11), Fragmentation(301, (150, 40, 90))
_STALLS = (faults.AT_HEAD, faults.at_token(3), faults.AFTER_FINISH)
_NEEDED = ("input_ids", "sampling_params", "stream")
#: Fields with the reason for which a router must not continue a request with them.
_EXTRAS = (*some.REFUSED, *((fields, "") for fields in some.NEUTRAL))
_HARMLESS: tuple[dict[str, Any], ...] = (
    {"rid": "c"},
    {"a_future_field": [1, 2.5, None, "ü"]},
    {"return_logprob": True},
    {"return_prompt_token_ids": True},
    {"sampling_params": {**_SAMPLING, "logit_bias": {"3": 1.5}}},
)
#: Requests that a worker refuses.
_INVALID: tuple[dict[str, Any], ...] = (
    {"sampling_params": {"max_new_tokens": -1}},
    {"sampling_params": {"temperature": -1.0}},
    {"input_ids": "no tokens"},
)


def _steerless(case: Case) -> Case:
    """The case before a router that chooses its workers, and a network that cuts the bytes, as they like."""
    return Case(case.body, case.faults)


def _case(fields: dict[str, Any], plan: tuple[Planned, ...] = (), *, stream: bool) -> Case:
    plain = _PLAIN if plan else _UNTOUCHED
    return Case(json.dumps({**plain, **fields, "stream": stream}).encode(), plan)


def _both(plan: tuple[Planned, ...], last: int = 7) -> Iterator[Trial]:
    """Unary and stream, with a prompt that ends with `last`."""
    for stream in (True, False):
        fields = {"rid": "b", "return_logprob": True, "input_ids": [5, 6, last]}
        yield Trial(_case(fields, plan, stream=stream))


@cache
def faulted() -> tuple[Trial, ...]:
    """Requests that may be continued: each alone, and cut wherever an answer can be."""
    trials = [Trial(case) for case in dict.fromkeys(map(_steerless, some.hard()))]
    for place in _PLACES:
        trials += _both((place,))
    trials += _both(((faults.at_token(3), faults.CLOSE), (faults.at_token(2), faults.RESET)))
    for stream in (True, False):  # nameless, without logprobs
        trials += [Trial(_case({}, ((faults.at_token(4), faults.CLOSE),), stream=stream))]
    pieces = [_in_pieces(trial, _SMALL) for trial in _both(((faults.at_token(2), faults.CLOSE),))]
    return (*trials, *rich(), *pieces)


def _in_pieces(trial: Trial, how: Fragmentation) -> Trial:
    return replace(trial, case=replace(trial.case, fragmentation=how))


@cache
def rich() -> tuple[Trial, ...]:
    """Requests whose continuations have many fields to repeat; what is lost changes the answer, where it can."""
    found = []
    for sampling in (_SAMPLED, _stopping()):
        for place in ((faults.at_token(2), faults.CLOSE), (faults.inside_json(4, 60), faults.RESET)):
            fields = {**_REPEATED, "sampling_params": sampling}
            found += [Trial(_case(fields, (place,), stream=stream)) for stream in (True, False)]
    return tuple(found)


def _stopping() -> dict[str, Any]:
    """With a stop token after every cut of `rich`, and another one that is due there but for `min_new_tokens`."""
    sampling: dict[str, Any] = {"max_new_tokens": 50, "temperature": 0}
    early = _tokens(sampling)[4]
    sampling |= {"min_new_tokens": 5, "stop_token_ids": [early]}
    return {**sampling, "stop_token_ids": [early, _tokens(sampling)[7]]}


def _tokens(sampling: dict[str, Any]) -> list[int]:
    """What `_PLAIN` is answered under this sampling, with the adapter of `_REPEATED`."""
    steps = generate(some.MODEL, _PLAIN["input_ids"], Sampling.parse(sampling), _REPEATED["lora_path"])
    return [step.token for step in steps]


@cache
def streamed() -> tuple[Trial, ...]:
    """Those that stream."""
    return tuple(trial for trial in faulted() if trial.case.streaming)


@cache
def hopeless() -> tuple[Trial, ...]:
    """Every attempt fails, each time of another prompt: a router may take it for what kills."""
    places = (
        (faults.AT_HEAD, faults.CLOSE),
        (faults.at_token(2), faults.RESET),
        (faults.inside_json(1, 40), faults.CLOSE),
    )
    return tuple(trial for last, place in enumerate(places, 20) for trial in _both((place,) * _ALL, last))


@cache
def stalled() -> tuple[Trial, ...]:
    """A worker goes silent, and comes back when the faults stop."""
    return tuple(trial for where in _STALLS for trial in _both(((where, faults.STALL),), 9))


@cache
def left() -> tuple[Trial, ...]:
    """A worker goes silent among its tokens, and the client away."""
    return tuple(replace(trial, leaves=True) for trial in _both(((faults.at_token(3), faults.STALL),), 9))


@cache
def crowded() -> tuple[Trial, ...]:
    """Requests at the same time, no two alike."""
    found = []
    for stream in (True, False):
        fields = [{"rid": f"g-{number}.", "input_ids": [5, 6, 10 + number]} for number in range(_CROWD)]
        first, *others = (_case(more, stream=stream) for more in fields)
        found.append(Trial(first, beside=tuple(others)))
    return tuple(found)


@cache
def refused() -> tuple[Trial, ...]:
    """Requests that must not be continued, their worker dying among tokens; and some that look like them."""
    extras = [*some.REFUSED, *((fields, "") for fields in some.NEUTRAL)]
    return tuple(
        _judged(extra, ((faults.at_token(3), faults.CLOSE),), stream) for extra in extras for stream in (True, False)
    )


@cache
def untouched() -> tuple[Trial, ...]:
    """No faults: requests of every kind, also such as a worker refuses, fields that nobody knows, bytes in pieces."""
    trials = [_judged(extra, (), stream) for extra in _EXTRAS for stream in (True, False)]
    for fields in (*_HARMLESS, *_INVALID):
        trials += [Trial(_case(fields, stream=stream), invalid=fields in _INVALID) for stream in (True, False)]
    for stream in (True, False):
        trials += [_in_pieces(Trial(_case({"rid": "f"}, stream=stream)), how) for how in (_SMALL, _HALVES)]
    return tuple(trials)


def _judged(extra: tuple[dict[str, Any], str], plan: tuple[Planned, ...], stream: bool) -> Trial:
    body, reason = some.judged({**(_PLAIN if plan else _UNTOUCHED), "rid": "d"}, extra, stream)
    return Trial(Case(body, plan), reason)


def drawn(count: int, seed: int) -> tuple[Trial, ...]:
    """Some of Hypothesis's examples."""
    found: list[Trial] = []
    if not count:
        return ()

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(some.cases(fragmentation=st.just(WHOLE)))
    def collect(case: Case) -> None:
        found.append(Trial(_steerless(case)))

    collect()
    return tuple(found)


def simpler(trial: Trial) -> Iterator[Trial]:
    """Trials that are like this one, but less: fewer faults, fewer fields. A reason keeps its fields."""
    case = trial.case
    if case.fragmentation != WHOLE:
        yield _in_pieces(trial, WHOLE)
    if len(case.faults) > 2:
        yield replace(trial, case=replace(case, faults=case.faults[:1]))
    for at in range(min(3, len(case.faults))):
        yield replace(trial, case=replace(case, faults=case.faults[:at] + case.faults[at + 1 :]))
    request = case.request
    smaller = [{key: value for key, value in request.items() if key != name} for name in request if name not in _NEEDED]
    sampling = request.get("sampling_params") or {}
    for name in () if not isinstance(sampling, dict) else sampling.keys() - {"max_new_tokens", "temperature"}:
        less = {key: value for key, value in sampling.items() if key != name}
        smaller.append({**request, "sampling_params": less})
    for fields in () if trial.reason else smaller:
        yield replace(trial, case=replace(case, body=json.dumps(fields).encode()))
