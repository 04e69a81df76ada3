"""What the tests of other people's workers and routers share: names to choose from, and factories that may be wrong."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import trio

from dyn_relay.net import Network
from dyn_testkit.determinism import seeded
from dyn_testkit.simnet import SimHost, SimNetwork

T = TypeVar("T")

#: s.
_LEAST = 0.1


class NotStarted(Exception):
    """A factory has not yielded in time."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker or a router is, and how to get there: what a factory may yield."""

    url: str
    #: None: real sockets.
    network: Network | None = None


def chosen(known: Collection[str], only: Iterable[str] | None, skip: Iterable[str], where: str) -> list[str]:
    """The known names that are wanted, in their own order. Raises `TypeError`, `ValueError`."""
    if isinstance(only, str) or isinstance(skip, str):
        raise TypeError("only= and skip= are collections of names, not a string")
    names, without = list(known) if only is None else list(only), set(skip)
    for name in (*names, *sorted(without)):
        if name not in known:
            close = ", ".join(difflib.get_close_matches(name, known, 3))
            what = where.rstrip("S").lower()
            raise ValueError(f"there is no {what} {name!r}; " + (f"is it {close}?" if close else f"see {where}"))
    wanted = [name for name in known if name in names and name not in without]
    if not wanted:
        raise ValueError("only= and skip= leave nothing to run")
    return wanted


def require_factory(factory: object, name: str, takes: str) -> None:
    """Raises `TypeError` unless it can be called."""
    if hasattr(factory, "__aenter__"):
        raise TypeError(f"{name} is a context manager; give a function that makes one: lambda: ...")
    if not callable(factory):
        raise TypeError(f"{name} must be a function {takes}, not {factory!r}")


def require_seconds(**given: float) -> None:
    """Raises `ValueError` for a time in which nothing can happen."""
    for name, seconds in given.items():
        if seconds < _LEAST:
            raise ValueError(f"{name}= must be {_LEAST:g} at least, not {seconds:g}")


def require_manager(manager: object, name: str) -> None:
    """Raises `TypeError` unless a factory has made an async context manager."""
    if hasattr(manager, "__aenter__") and hasattr(manager, "__aexit__"):
        return
    hint = ""
    if inspect.iscoroutine(manager):
        manager.close()
        hint = "; an `async def` that yields needs @contextlib.asynccontextmanager"
    elif inspect.isasyncgen(manager):
        hint = "; put @contextlib.asynccontextmanager on it"
    elif hasattr(manager, "__enter__"):
        hint = "; a plain context manager is not enough"
    raise TypeError(f"{name} must return an async context manager, not {_short(manager)}{hint}")


def endpoint(thing: Any, name: str) -> tuple[str, int, Network | None]:
    """Host, port and network of what a factory has yielded. Raises `TypeError`, `ValueError`."""
    url = thing if isinstance(thing, str) else getattr(thing, "url", None)
    if not isinstance(url, str):
        raise TypeError(f"{name} must yield a URL, or something with a `url`, not {_short(thing)}")
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"the {name.partition('_')[0]}'s url must be http://HOST:PORT, not {url!r}")
    return parts.hostname, parts.port or 80, getattr(thing, "network", None)


def repeatable(network: Network | None, seed: int = 0) -> AbstractContextManager[None]:
    """Before a network in memory the block is the same each time: trio's scheduler, too, follows the seed."""
    return seeded(seed) if isinstance(network, SimNetwork | SimHost) else nullcontext()


async def within(
    manager: AbstractAsyncContextManager[Any], judge: Callable[[Any], Awaitable[T]], start_timeout: float, name: str
) -> T | Exception:
    """What `judge` makes of what the manager yields, or the exception that the caller shall raise.

    Exceptions come back as values: raised in here, a nursery of the manager's could wrap them into groups.
    """
    found: T | Exception = NotStarted(f"{name} has not yielded within start_timeout={start_timeout:g} s")
    with trio.CancelScope(deadline=trio.current_time() + start_timeout) as scope:
        async with manager as thing:
            scope.deadline = math.inf
            try:
                found = await judge(thing)
            except (TypeError, ValueError) as exc:
                found = exc
            scope.deadline = trio.current_time() + start_timeout
    if scope.cancelled_caught and not isinstance(found, NotStarted):
        return RuntimeError(f"{name} has not ended within {start_timeout:g} s; it was cancelled")
    return found


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-100:]}"
