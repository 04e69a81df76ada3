"""What a policy is, and what it may know of an attempt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import Worker

#: The beginning of a sequence that an engine may have in its cache: token ids, or the text where only that is known.
Prefix = Sequence[int] | str


def _unknown() -> Prefix | None:
    return None


@dataclass(frozen=True, slots=True)
class Ask:
    """An attempt that needs a target."""

    #: Answers that it is for.
    generations: int = 1
    #: It goes on with an answer that has tokens.
    resumed: bool = False
    #: Requests with the same key should meet the same cache; "" if the client names none.
    key: str = ""
    #: Prompt and delivered tokens, read only by policies that look at them; None if not known.
    prefix: Callable[[], Prefix | None] = _unknown
    #: Prefixes are shared only between requests for which this is the same.
    cache_space: bytes = b""
    #: The data-parallel rank that its client asks for, if any; who has none such is asked only if all have none.
    rank: int | None = None


class Members(Protocol):
    """The fleet, as a policy sees it that follows its workers."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them."""

    async def changed(self) -> None:
        """Return when something has changed: who they are, how they are, what they say of themselves."""

    def restarted(self, worker: Worker, cause: str) -> None:
        """The policy has seen, by `cause`, that the worker is a new process. Calls `Policy.forget`."""


class Policy(ABC):
    """Chooses among targets that may all take the attempt."""

    @abstractmethod
    def choose(self, candidates: Sequence[Target], ask: Ask) -> Target:
        """One of `candidates`, which is never empty and is in the order of joining."""

    def forget(self, worker: Worker) -> None:  # noqa: B027 -- most policies remember nothing
        """The worker has left, or came back as a new process: whatever it had cached is gone."""

    async def run(self, fleet: Members) -> None:  # noqa: B027 -- most policies only choose
        """Whatever there is to do beside choosing; runs as long as the fleet does, and may return early."""

    def counts(self) -> Mapping[str, int]:
        """What it has counted so far, by names that are bounded."""
        return {}

    def sizes(self) -> Mapping[str, int]:
        """How much it remembers now, by names that are bounded."""
        return {}
