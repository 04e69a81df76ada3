"""Which handler takes which call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from dyn_relay.grpc.methods import Method
from dyn_relay.grpc.status import Code
from dyn_testkit.grpc.call import Call
from dyn_testkit.grpc.framing import Status, only_message

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

#: Answers a call, whose request has been parsed. Raises `Status`; `CallGone` may pass through.
Handler = Callable[[Call, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of a service."""

    request: type[Message]
    handler: Handler


#: By path.
Routes = Mapping[str, Route]


def unary(method: Method[Q, R], answer: Callable[[Q], Awaitable[R]]) -> tuple[str, Route]:
    """The path and the route of a method that answers with one message. `answer` raises `Status`."""

    async def handler(call: Call, request: Q) -> None:
        await call.send(await answer(request))

    return method.path, Route(method.request, handler)


async def dispatch(routes: Routes, call: Call) -> None:
    """Answer a call whose request is whole. Raises `Status`."""
    route = routes.get(call.path)
    if route is None:
        raise Status(Code.UNIMPLEMENTED)
    data = only_message(bytes(call.body))
    try:
        request = route.request.FromString(data)
    except DecodeError as exc:
        raise Status(Code.INTERNAL, f"failed to decode Protobuf message: {exc}") from exc
    await route.handler(call, request)
