"""Goals against vacuous success: a property that never met its hard case has shown nothing.

A law that holds for 512 examples in which no connection was ever cut says little. So a run lists what must have
happened at least once, and fails if it did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dyn_testkit.faults import Spot
from dyn_testkit.laws.observed import Attempt, Observed


class NeverHappened(AssertionError):
    """A listed event did not happen in the whole run."""


def _fired(*spots: Spot) -> Callable[[Observed], bool]:
    return lambda seen: any(at(attempt) in spots for attempt in seen.attempts)


def at(attempt: Attempt) -> Spot | None:
    """Where an attempt's fault fired; None if none did."""
    return attempt.fault[0].spot if attempt.fired and attempt.fault is not None else None


def _kills(count: int) -> Callable[[Observed], bool]:
    return lambda seen: sum(attempt.fired for attempt in seen.attempts) >= count


def _other_dialect(seen: Observed) -> bool:
    pairs = zip(seen.attempts, seen.attempts[1:], strict=False)
    return any(one.dialect != two.dialect and seen.resumed(number + 1) > 0 for number, (one, two) in enumerate(pairs))


def _finished_here(seen: Observed) -> bool:
    spots = (Spot.AT_TOKEN, Spot.AFTER_LAST_TOKEN)
    return bool(seen.attempts) and at(seen.attempts[-1]) in spots and seen.response.complete


def _finished_with(kind: str) -> Callable[[Observed], bool]:
    return lambda seen: _finished_here(seen) and b'"type":"%s"' % kind.encode() in seen.response.body


#: Goals of any backend: a name, and how to tell that it happened.
ANY: dict[str, Callable[[Observed], bool]] = {
    "nothing happens": lambda seen: not any(attempt.fired for attempt in seen.attempts),
    "one kill": _kills(1),
    "two kills in one request": _kills(2),
    "three kills in one request": _kills(3),
    "killed before any byte": _fired(Spot.AT_HEAD),
    "killed between two tokens": _fired(Spot.AT_TOKEN),
    "cut inside a chunk-size line": _fired(Spot.INSIDE_CHUNK_SIZE),
    "cut inside JSON": _fired(Spot.INSIDE_JSON),
    "killed between last token and finish": _fired(Spot.AFTER_LAST_TOKEN),
    "killed between finish and [DONE]": _fired(Spot.AFTER_FINISH),
    "killed between [DONE] and the last chunk": _fired(Spot.BEFORE_LAST_CHUNK),
    "killed after the answer": _fired(Spot.AFTER_DONE),
    "continued": lambda seen: any(seen.resumed(number) for number in range(len(seen.attempts))),
    "continued twice": lambda seen: len({seen.resumed(number) for number in range(len(seen.attempts))} - {0}) > 1,
    "begun again, nothing was delivered": lambda seen: len(seen.attempts) > 1 and not seen.resumed(1),
    "dialect changed across a cut": _other_dialect,
    "nobody left": lambda seen: seen.all_fired and not _finished_here(seen),
    "one byte a read": lambda seen: seen.case.fragmentation.largest == 1,
}
#: Those that look at SGLang's fields.
SGLANG: dict[str, Callable[[Observed], bool]] = {
    "budget spent at the cut": _finished_with("length"),
    "stop token delivered, finish lost": _finished_with("stop"),
    "stream": lambda seen: seen.case.streaming,
    "unary": lambda seen: not seen.case.streaming,
    "no token asked for": lambda seen: seen.request["sampling_params"].get("max_new_tokens") == 0,
    "logprobs of the prompt": lambda seen: b'"input_token_logprobs":[[' in seen.response.body,
    "cached tokens": lambda seen: b'"cached_tokens_details":{' in seen.response.body,
}


def _prefill(*spots: Spot) -> Callable[[Observed], bool]:
    return lambda seen: any(at(leg) in spots for leg in seen.prefills)


#: Those of prefill/decode pairs.
PAIRS: dict[str, Callable[[Observed], bool]] = {
    "prefill ended before it met decode": _prefill(Spot.AT_HEAD, Spot.AT_BOOTSTRAP),
    "prefill ended during the transfer": _prefill(Spot.IN_TRANSFER),
    "prefill ended after the transfer": _prefill(Spot.AFTER_TRANSFER, Spot.AT_TOKEN),
    "decode ended before it met prefill": _fired(Spot.AT_HEAD, Spot.AT_BOOTSTRAP),
    "decode ended during the transfer": _fired(Spot.IN_TRANSFER),
    "decode ended after the transfer": _fired(Spot.AFTER_TRANSFER),
    "another pair": lambda seen: len({leg.body for leg in seen.prefills}) > 1,
    "both legs whole at once": lambda seen: len(seen.attempts) == len(seen.prefills) == 1,
    "rows to replay": lambda seen: b'"routed_experts":' in seen.response.body,
    "rows from a position on": lambda seen: (
        bool(seen.request.get("routed_experts_start_len")) and b'"routed_experts":' in seen.response.body
    ),
}
#: Every known goal.
GOALS = ANY | SGLANG | PAIRS


class Sometimes:
    """Counts how often each listed goal was met. Raises `KeyError` for a goal that nobody knows."""

    def __init__(self, goals: Iterable[str]) -> None:
        self.met = dict.fromkeys(goals, 0)
        self._tests = {goal: GOALS[goal] for goal in self.met}

    def watch(self, seen: Observed) -> None:
        """Count what happened in one observation."""
        for goal, happened in self._tests.items():
            self.met[goal] += happened(seen)

    def verify(self) -> None:
        """Raise `NeverHappened` if a goal was never met."""
        missing = [goal for goal, count in self.met.items() if not count]
        if missing:
            raise NeverHappened(f"never happened: {'; '.join(missing)} (met: {self.met})")
