"""The table of checks: each is a small function that asks a worker something and says whether the contract holds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dyn_testkit.contract.subject import Subject

Run = Callable[["Subject"], Awaitable[None]]


class Broken(Exception):
    """The worker does otherwise than the contract says."""


class Silent(Broken):
    """Not even a whole answer came: refused, cut, or nothing in time."""


class Inapplicable(Exception):
    """The check has no meaning for this worker, or nothing can be concluded; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One fact of the contract, and how to find out."""

    name: str
    #: What the contract says, one sentence.
    fact: str
    #: Where it says so: a section of the contract, or the file and line of SGLang 0.5.23.
    source: str
    run: Run


#: name -> check, in the order in which they run.
CHECKS: dict[str, Check] = {}


def check(source: str) -> Callable[[Run], Run]:
    """Put a function into the table under its own name; the first paragraph of its docstring is the fact."""

    def register(run: Run) -> Run:
        fact = " ".join((run.__doc__ or "").partition("\n\n")[0].split())
        add(Check(run.__name__, fact, source, run))
        return run

    return register


def add(check: Check) -> None:
    """Put a check into the table."""
    assert check.name not in CHECKS, check.name
    CHECKS[check.name] = check


def arrange(modules: Sequence[str]) -> None:
    """Sort the table by the modules that the checks are from."""
    ordered = sorted(CHECKS.values(), key=lambda check: modules.index(check.run.__module__))
    CHECKS.clear()
    CHECKS.update((check.name, check) for check in ordered)


def expect(holds: bool, otherwise: str) -> None:
    """Raises `Broken` unless it holds."""
    if not holds:
        raise Broken(otherwise)


def equal(what: str, got: object, wanted: object) -> None:
    """Raises `Broken` unless the two are the same."""
    expect(same(got, wanted), f"{what}: got {short(got)}, the contract says {short(wanted)}")


def same(one: object, other: object) -> bool:
    """Equal, and of the same JSON types: typed clients refuse 5.0 and true where 5 is due."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def number(value: object) -> bool:
    """It is a JSON number; whether a whole one is spelled -1 or -1.0 is the writer's business."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def short(value: object, limit: int = 300) -> str:
    """A value in words, the middle of a long one left out."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} ... {text[-limit // 3 :]}"
