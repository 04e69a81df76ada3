"""The laws about tokens, for any backend: they know a request and an answer through the case's `Wire` alone.

`whole` is what an uninterrupted run gives. The laws beside this module ask the same and more of SGLang's answers, field
by field.
"""

from __future__ import annotations

from dyn_testkit.laws.answers import httpx_reads
from dyn_testkit.laws.observed import Observed
from dyn_testkit.laws.wire import Reading


def require(holds: bool, law: str, seen: Observed, words: str) -> None:
    """Raises `AssertionError` with the whole story unless it holds."""
    if not holds:
        raise AssertionError(f"{law}: {words}\n{seen}")


def equivalence(seen: Observed, whole: Reading) -> None:
    """The client's answer is the uninterrupted one: complete, the same tokens, the same finish."""
    law, told = "equivalence", seen.case.wire.read(seen.response)
    require(told.error is None, law, seen, f"an error: {told.error}")
    require(told.complete, law, seen, f"the answer broke off: {seen.response.broken or 'it has no end'}")
    require(told.tokens == whole.tokens, law, seen, f"the tokens are {told.tokens}, not {whole.tokens}")
    require(told.finish == whole.finish, law, seen, f"the finish is {told.finish}, not {whole.finish}")


def budget(seen: Observed, whole: Reading, *, own: bool = True) -> None:
    """No attempt asks for more than is left, and a request with nothing left makes none.

    An attempt's prompt is the client's and the first tokens of the answer, and the rest of it is the client's own.
    `own` False: of a router that writes requests anew, what the first attempt made of the client's fields is repeated
    by all others.
    """
    law, wire, mine = "budget", seen.case.wire, seen.case.body
    before = 0
    for number, attempt in enumerate(seen.attempts):
        taken, what = seen.resumed(number), f"attempt {number}"
        require(taken >= before, law, seen, f"{what} took {taken} tokens for delivered, the one before it {before}")
        wanted = wire.prompt(mine) + whole.tokens[:taken]
        require(wire.prompt(attempt.body) == wanted, law, seen, f"{what} has another prompt")
        nothing_left = taken > 0 and taken >= len(whole.tokens)
        require(not nothing_left, law, seen, f"{what} was made though nothing was left to generate")
        left, asked = max(0, wire.budget(mine) - taken), wire.budget(attempt.body)
        require(asked == left, law, seen, f"{what} asks for {asked}, {left} is left")
        first, second = wire.own(mine if own else seen.attempts[0].body), wire.own(attempt.body)
        names = {*first, *second} if own else wire.own(mine).keys()
        changed = sorted(name for name in names if first.get(name) != second.get(name))
        require(not changed, law, seen, f"{what} changed {changed}")
        before = taken


def fold(one: Observed, other: Observed) -> None:
    """Two ways to ask for the same (whole or streamed, in larger pieces or smaller) give the same answer."""
    told = [seen.case.wire.read(seen.response) for seen in (one, other)]
    for seen, reading in zip((one, other), told, strict=True):
        require(reading.complete, "fold", seen, "no complete answer")
    require(told[0] == told[1], "fold", one, f"the two differ: {told[0]} and {told[1]}\n{other}")


def no_false_success(seen: Observed, whole: Reading) -> None:
    """A truncated answer never parses as a complete one, and one that failed does not look like one that went well.

    For a client that believes any finish, and whose HTTP library is h11 or httpx: what is finished has all the tokens;
    what is framed as complete says how it ended.
    """
    law, response = "no false success", seen.response
    readings = {"h11": response if response.complete else None}
    if response.wire:
        readings["httpx"] = httpx_reads(response.wire)
    for library, reading in readings.items():
        if reading is None:
            continue
        told = seen.case.wire.read(reading)
        good = told.finish is None or told.tokens == whole.tokens
        require(good, law, seen, f"through {library}, {told.tokens} passes for {whole.tokens}")
        ended = reading.status != 200 or told.finish is not None or told.error is not None
        require(
            ended, law, seen, f"complete framing, through {library}, around an answer that does not say how it ended"
        )


def exactly_once(seen: Observed) -> None:
    """Every token that the client was shown is one attempt's, in order, and no attempt goes on from more than was sent.

    Also of an answer that broke off.
    """
    law, wire = "exactly once", seen.case.wire
    sent: list[int] = []
    for number, attempt in enumerate(seen.attempts):
        taken = seen.resumed(number)
        require(taken <= len(sent), law, seen, f"attempt {number} goes on from {taken} tokens, {len(sent)} were sent")
        sent = sent[:taken] + wire.read(attempt.answer).tokens
    shown = wire.read(seen.response).tokens
    require(shown == sent[: len(shown)], law, seen, f"shown {shown}, the attempts add up to {sent}")
