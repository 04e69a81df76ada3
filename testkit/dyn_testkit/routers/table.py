"""The table of laws: each is what a router must do, the trials that it is put through, and how to see that it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from dyn_testkit import laws
from dyn_testkit.laws.cases import MODEL
from dyn_testkit.laws.levels import other
from dyn_testkit.laws.observed import Observed
from dyn_testkit.oracle import Oracle
from dyn_testkit.routers import trials
from dyn_testkit.routers.subject import Subject
from dyn_testkit.routers.trials import Trial

ORACLE = Oracle(MODEL)
Check = Callable[[Subject, Trial], Awaitable[None]]
Trials = Callable[[], Sequence[Trial]]


@dataclass(frozen=True, slots=True)
class Law:
    """One law, and how to find out."""

    name: str
    number: int
    #: What it says, one sentence.
    fact: str
    trials: Trials
    check: Check
    #: Hypothesis's examples are trials of it, too.
    draws: bool = False


#: name -> law.
LAWS: dict[str, Law] = {}


def law(number: int, *sources: Trials, draws: bool = False) -> Callable[[Check], Check]:
    """Put a function into the table under its own name; the first paragraph of its docstring is the fact."""

    def register(check: Check) -> Check:
        name = check.__name__.replace("_", " ")
        fact = " ".join((check.__doc__ or "").partition("\n\n")[0].split())
        LAWS[name] = Law(name, number, fact, lambda: [trial for source in sources for trial in source()], check, draws)
        return check

    return register


@law(1, trials.faulted, trials.crowded, draws=True)
async def equivalence(subject: Subject, trial: Trial) -> None:
    """The client's answer equals the uninterrupted one, also if others ask at the same time."""
    if trial.beside:
        for seen in await subject.together((trial.case, *trial.beside)):
            laws.equivalence(seen, ORACLE)
    else:
        laws.equivalence(await subject.observe(trial.case), ORACLE)


@law(2, trials.refused)
async def admission(subject: Subject, trial: Trial) -> None:
    """A request that must not be continued never is, and its client learns that its worker died.

    A router that says whether it would continue a request must say the right thing, and name the reason.
    """
    seen = await subject.observe(trial.case)
    if subject.tells:
        laws.admission(seen, trial.reason)
    elif trial.reason:
        laws.never_continued(seen)


@law(3, trials.faulted, draws=True)
async def budget(subject: Subject, trial: Trial) -> None:
    """No continuation asks for more than is left, and with nothing left there is none."""
    laws.budget(await subject.observe(trial.case), ORACLE, own=subject.tells)


@law(6, trials.streamed, draws=True)
async def fold(subject: Subject, trial: Trial) -> None:
    """A unary answer is the fold of the stream.

    Where both came whole: that they do is another law.
    """
    stream = await subject.observe(other(trial.case, stream=True))
    unary = await subject.observe(other(trial.case, stream=False))
    if all(seen.case.wire.read(seen.response).complete for seen in (stream, unary)):
        laws.fold(unary, stream)


@law(7, trials.untouched)
async def passthrough(subject: Subject, trial: Trial) -> None:
    """With no fault the client's bytes are the worker's, and the worker's request is the client's, in one attempt.

    A router that writes requests anew must write all fields of the client's, and only those (or null). The bytes of an
    answer do not count where it has turned a unary request into a stream.
    """
    seen = await subject.observe(trial.case)
    if trial.invalid and not seen.attempts and 400 <= seen.response.status < 500:
        return
    once = len(seen.attempts) == 1
    laws.tokens.require(once, "passthrough", seen, f"{len(seen.attempts)} attempts, status {seen.response.status}")
    sent = seen.attempts[0]
    lost, added = _changed(seen)
    laws.tokens.require(not lost, "passthrough", seen, f"fields were lost or changed: {', '.join(lost)}")
    if (sent.sent.get("stream") is True) is trial.case.streaming:
        laws.verbatim(seen)
    laws.tokens.require(not added, "passthrough", seen, f"fields were added: {', '.join(added)}")


def _changed(seen: Observed) -> tuple[list[str], list[str]]:
    """Fields that the first worker did not get as they were sent, and those that nobody had sent."""
    first, second = (seen.case.wire.own(body) for body in (seen.case.body, seen.attempts[0].body))
    return sorted(name for name in first if first[name] != second.get(name)), sorted(second.keys() - first.keys())


@law(8, trials.faulted, trials.hopeless, draws=True)
async def no_false_success(subject: Subject, trial: Trial) -> None:
    """A truncated answer never parses as a complete one.

    Where the worker got what the client sent: to lose a field is against another law.
    """
    seen = await subject.observe(trial.case)
    if seen.attempts and _changed(seen)[0]:
        return
    laws.no_false_success(seen, ORACLE, loud=subject.tells)
    size = len(seen.response.wire)
    for kept in (size // 2, size - 1) if seen.response.complete else ():
        laws.truncation(seen, ORACLE, kept)


@law(10, trials.faulted, trials.hopeless, trials.stalled, trials.left, trials.refused, draws=True)
async def liveness(subject: Subject, trial: Trial) -> None:
    """When faults stop, every request ends in time, and the router serves again.

    What a worker has sent reaches the client while the worker is silent; nobody generates for a client that has left.
    """
    if trial.leaves:
        await subject.leave(trial.case)
        return
    seen = await subject.observe(trial.case)
    shown = seen.case not in subject.withheld
    laws.tokens.require(
        shown, "liveness", seen, "a stream is held back: its worker fell silent, and nothing of it came"
    )
