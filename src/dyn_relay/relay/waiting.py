"""Waiting for something, but no longer than the client does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from dyn_relay.net import Sink

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection: nobody wants the answer any more."""


class Unwanted(Exception):
    """The request was aborted; nothing is to be tried any more."""


async def unless_gone(client: Sink, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work()`, given up as soon as the client leaves. Raises `ClientGone`."""
    results: list[T] = []
    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await client.wait_closed()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            results.append(await work())
        except Exception as exc:  # carried out of the nursery as it is, not as a group
            errors.append(exc)
        nursery.cancel_scope.cancel()
    if errors:
        raise errors[0]
    if not results:
        raise ClientGone
    return results[0]
