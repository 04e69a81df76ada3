"""`--rejoin`: may a worker that was away serve again, with the weights that it has now?

Away: it was dead, or it is another process than before. Healthy is not enough then: an engine that was restarted has
the weights that it was started with, and what it generates with them is off-policy, in silence. A worker's first join
is not judged, nor one whose URL an operator or a trainer adds again: who does that knows.

Compared is with the workers that serve and were not away. The fleet's version is the largest of theirs if all are
integers, else that of most. If nobody can be compared with (all were away), waiting for ever would help nobody: the
largest version among those that answer then, if all are integers, else that on which the ones that serve already, or
all of them, agree. Who serves on such terms is judged again at every probe, until it has been compared with one that
was not away, or the whole fleet answers and agrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Literal

from dyn_relay.formats.weights import number

if TYPE_CHECKING:
    from dyn_relay.fleet.worker import Worker

Rejoin = Literal["always", "weight-version-match", "manual"]


class Standing(Enum):
    """What is known of the weights of a worker."""

    KNOWN = "known"  #: it was not away, or has been let in since
    AWAY = "away"  #: it was, and gets nothing before it is let in
    PROVISIONAL = "provisional"  #: it was, and serves because nobody can be compared with


def judge(worker: Worker, others: Sequence[Worker], rejoin: Rejoin) -> tuple[Standing, str]:
    """What becomes of a worker that was away and answers; if it stays AWAY, why, for people.

    `others`: all the others that are to stay in the fleet.
    """
    if rejoin == "always":
        return Standing.KNOWN, ""
    if rejoin == "manual":
        return Standing.AWAY, "it waits to be admitted"
    has = worker.traits.weight_version
    serving = [other for other in others if other.healthy and other.standing is Standing.KNOWN]
    wanted = _of(serving) if serving else _of_those_that_answer(worker, others)
    if wanted is not None and has not in wanted:
        return Standing.AWAY, f"it has {has!r}, the fleet {_words(wanted)}"
    together = all(other.answers and other.traits.weight_version == has for other in others)
    return (Standing.KNOWN if serving or together else Standing.PROVISIONAL), ""


def _of(serving: Iterable[Worker]) -> Collection[str] | None:
    """Their version, or versions of equally many; None if they tell none."""
    known = _versions(serving)
    return _largest(known) or _most(known) if known else None


def _of_those_that_answer(worker: Worker, others: Sequence[Worker]) -> Collection[str] | None:
    answering = [worker, *(other for other in others if other.answers)]
    known = _versions(answering)
    if not known:
        return None
    return _largest(known) or _versions(one for one in answering if one.healthy) or _one(known)


def _versions(workers: Iterable[Worker]) -> list[str]:
    return [one.traits.weight_version for one in workers if one.traits.weight_version is not None]


def _largest(versions: Collection[str]) -> Collection[str]:
    """As many spellings as there are; empty if one is no integer."""
    numbers = {version: number(version) for version in versions}
    known = [one for one in numbers.values() if one is not None]
    return {version for version in versions if numbers[version] == max(known)} if len(known) == len(numbers) else ()


def _most(versions: Collection[str]) -> Collection[str]:
    counts = Counter(versions)
    return {version for version in versions if counts[version] == max(counts.values())}


def _one(versions: Collection[str]) -> Collection[str]:
    """Empty if they differ."""
    return set(versions) if len(set(versions)) == 1 else ()


def _words(versions: Collection[str]) -> str:
    return " or ".join(sorted(map(repr, set(versions)))) or "no version that all agree on"
