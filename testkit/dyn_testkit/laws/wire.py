"""What the laws about tokens must know of a backend: how it spells a request, and how a client reads its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dyn_testkit.client import Response


@dataclass(frozen=True, slots=True)
class Reading:
    """What a client makes of an answer, whole or not."""

    tokens: list[int] = field(default_factory=list)
    #: Why it ended well, in the backend's words; None: it does not say that it did.
    finish: Any = None
    #: What went wrong, in its words; None: nothing, or it does not say.
    error: Any = None
    #: By everything that its spelling and its framing say, nothing is missing.
    complete: bool = False


class Wire(Protocol):
    """One backend's spelling. Of requests it reads the client's own and a router's continuations of them."""

    def prompt(self, body: bytes) -> list[int]:
        """The tokens that a request goes on from."""

    def budget(self, body: bytes) -> int:
        """The most tokens that it asks for."""

    def own(self, body: bytes) -> Mapping[str, Any]:
        """Everything in it that is the client's alone: a continuation says the same."""

    def read(self, response: Response) -> Reading:
        """An answer, as far as it came, as a careless client reads it: what has a finish is finished."""
