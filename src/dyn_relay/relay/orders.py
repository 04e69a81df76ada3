"""What workers are told and asked beside the requests: to drop an attempt, and what a format wants to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import trio

from dyn_relay.fleet.worker import State, Worker
from dyn_relay.formats.base import Outbound
from dyn_relay.http11.client import Response, fetch
from dyn_relay.http11.errors import BadResponse
from dyn_relay.http11.headers import Headers
from dyn_relay.net import ConnectFailed, ConnectionBroken

if TYPE_CHECKING:
    from dyn_relay.relay.context import Context

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("relay")

#: Seconds. An engine answers an abort from its HTTP process, at once or never.
ORDER_TIMEOUT = 5.0
#: Seconds. What a format asks may be work, and many may ask at once: after a death, say.
QUESTION_TIMEOUT = 60.0


async def tell(context: Context, worker: Worker, order: Outbound) -> bool:
    """Best effort: True if the worker answered 200. A dead worker needs no order, so nothing is raised."""
    headers: Headers = [(b"content-type", order.content_type)]
    if context.config.worker_api_key:
        headers.append((b"authorization", b"Bearer " + context.config.worker_api_key.encode()))
    try:
        response = await fetch(
            context.pool,
            worker.origin,
            order.method,
            order.path,
            headers=headers,
            body=order.body,
            timeout=ORDER_TIMEOUT,
        )
    except (ConnectFailed, ConnectionBroken, BadResponse, trio.TooSlowError) as exc:
        log.debug("order not delivered", worker=worker.id, path=order.path, error=str(exc) or type(exc).__name__)
        return False
    return response.status == 200


class LastOrders:
    """Tells workers to drop what nobody waits for any more.

    One that has just failed is asked first whether it answers at all: once, and what it is to be told is gathered
    meanwhile. A dead one's thousand streams would else be a thousand dials, and a thousand tasks.
    """

    def __init__(self) -> None:
        #: For workers that are being asked; each with what is set when they were told, or need not be.
        self._gathered: dict[Worker, tuple[list[Outbound], trio.Event]] = {}

    def tell(self, context: Context, worker: Worker, order: Outbound) -> trio.Event:
        """Begin to. What is returned is set when that is over."""
        if worker.state not in (State.SUSPECT, State.DEAD) or context.fleet.get(worker.id) is not worker:
            return context.chores.start(partial(tell, context, worker, order))
        if worker in self._gathered:
            orders, over = self._gathered[worker]
            orders.append(order)
            return over
        orders = [order]
        over = context.chores.start(partial(self._tell_if_alive, context, worker, orders))
        self._gathered[worker] = orders, over
        return over

    async def _tell_if_alive(self, context: Context, worker: Worker, orders: list[Outbound]) -> None:
        try:
            alive = await context.fleet.lives(worker)
        finally:
            del self._gathered[worker]
        if alive:
            async with trio.open_nursery() as nursery:
                for order in orders:
                    nursery.start_soon(tell, context, worker, order)


@dataclass(frozen=True, slots=True)
class Said:
    """What one worker said to an order that all got. `error`: why there is no answer."""

    worker: Worker
    answer: Response | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """It did what it was told. SGLang 0.5.23 can say 200 and `[false]`, or 200 and `{"success": false}`, if not."""
        if self.answer is None or not 200 <= self.answer.status < 300:
            return False
        value = self.value
        return not any(map(_refuses, value if isinstance(value, list) else [value]))

    @property
    def value(self) -> Any:
        """What the answer says: JSON, or else a text; None without an answer."""
        if self.answer is None:
            return None
        try:
            return msgspec.json.decode(self.answer.body)
        except (msgspec.MsgspecError, RecursionError):
            return self.answer.body.decode("utf-8", "replace").strip()


def _refuses(value: object) -> bool:
    return value is False or (isinstance(value, dict) and value.get("success", True) is not True)


async def tell_all(
    context: Context, workers: Sequence[Worker], order: Outbound, headers: Headers, timeout: float, *, once: bool
) -> list[Said]:
    """Tell all of them at once, and give what each said, in their order. `timeout` in seconds, for each.

    `once`: it must not be done twice, whatever its method.
    """
    said: dict[str, Said] = {}

    async def tell_one(worker: Worker) -> None:
        own: Headers = [(b"content-type", order.content_type)] if order.content_type else []
        try:
            answer = await fetch(
                *(context.pool, worker.origin, order.method, order.path),
                headers=[*own, *headers],
                body=order.body,
                timeout=timeout,
                fresh=once,
            )
            said[worker.id] = Said(worker, answer)
        except trio.TooSlowError:
            said[worker.id] = Said(worker, error=f"no answer within {timeout:g} s")
        except (ConnectFailed, ConnectionBroken, BadResponse) as exc:
            said[worker.id] = Said(worker, error=str(exc) or type(exc).__name__)

    async with trio.open_nursery() as nursery:
        for worker in workers:
            nursery.start_soon(tell_one, worker)
    return [said[worker.id] for worker in workers]


async def ask(context: Context, worker: Worker, question: Outbound, headers: Headers) -> Response:
    """A format's question. `headers`: those of the attempt that it is about. Raises as `fetch`."""
    return await fetch(
        context.pool,
        worker.origin,
        question.method,
        question.path,
        headers=[(b"content-type", question.content_type), *headers],
        body=question.body,
        timeout=QUESTION_TIMEOUT,
    )
