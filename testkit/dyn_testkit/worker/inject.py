"""Makes the fault of one request happen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import trio

from dyn_relay.net import Connection
from dyn_testkit.faults import Fault, FaultPlan, Kind, Seen, Spot, What
from dyn_testkit.worker.contract import Aborted, error_object
from dyn_testkit.worker.wire import LAST_CHUNK, Reply, chunk, reply_bytes, stream_head

_GARBAGE = {
    Spot.AT_HEAD: b"\x16\x03\x01\x02\x00 this is not HTTP\r\n\r\n",
    Spot.INSIDE_CHUNK_SIZE: b"xyz\r\n",
    Spot.INSIDE_JSON: b'"\xff\xfe}]',
    Spot.BEFORE_LAST_CHUNK: b"xyz\r\n",
    Spot.AFTER_DONE: b"xyz\r\n",
}
_GARBAGE_EVENT = chunk(b'data: {"output_ids":[1,oops\n\n')


class AnswerCut(Exception):
    """The connection is gone or in use by a fault; nothing more is to be sent on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injector(ABC):
    """The fault of one request (None: every method does nothing); how it strikes depends on the wire."""

    fault: Fault | None
    seen: Seen
    plan: FaultPlan
    kill_worker: Callable[[], None]
    #: Tokens that the attempt may generate; 0: not known yet.
    budget: int = 0

    @property
    def splits_at(self) -> int:
        """After this many tokens an event must end, so that the fault lands where it is wanted; 0 or less: none."""
        if self.fault is None:
            return 0
        token = self.fault.where.token
        return token if token >= 0 else self.budget + token

    @property
    def wants_late_finish(self) -> bool:
        """The last token and the finish must be in different events."""
        return self.fault is not None and self.fault.where.spot is Spot.AFTER_LAST_TOKEN

    async def at(self, spot: Spot, token: int = 0) -> None:
        """This place is reached. Returns if nothing happens, or after a stall.

        Raises `AnswerCut`, `Aborted`.
        """
        fault = self.fault
        if fault is not None and fault.where.spot is spot and self.splits_at == token:
            await self._happen(fault, spot)

    def lands(self, spot: Spot, sent: int, total: int) -> Fault | None:
        """The fault, if it lands inside an event that carries tokens `sent + 1 .. total`."""
        fault = self.fault
        if fault is None or fault.where.spot is not spot or not sent < fault.where.token <= total:
            return None
        return fault

    async def _happen(self, fault: Fault, spot: Spot) -> None:
        if fault in self.plan.revoked:
            return
        self.plan.record(fault, self.seen)
        match fault.what.kind:
            case Kind.STALL:
                await self.plan.released()
                return
            case Kind.DELAY:
                await trio.sleep((fault.what.code or 0) / 1000)
                return
            case Kind.KILL_WORKER:
                self.kill_worker()
                await trio.lowlevel.checkpoint()
            case Kind.ABORT_EVENT:
                raise Aborted("Injected abort", fault.what.code)
            case _ if await self._strike(fault.what, spot):
                return
        raise AnswerCut

    @abstractmethod
    async def _strike(self, what: What, spot: Spot) -> bool:
        """Do what only this wire can do; True if the answer goes on all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpInjector(Injector):
    """Strikes an answer over HTTP."""

    connection: Connection
    wall: Callable[[], float]
    streaming: bool = False

    async def cut(self, spot: Spot, sent: int, total: int, whole: bytes, size: int) -> bytes:
        """Filter the bytes of an event that carries tokens `sent + 1 .. total`; `size` counts its chunk-size digits.

        Returns what is still to be sent: all of it if no fault lands inside.
        """
        fault = self.lands(spot, sent, total)
        if fault is None:
            return whole
        if spot is Spot.INSIDE_CHUNK_SIZE:
            at = max(1, size // 2)
        else:
            body = size + len(b"\r\ndata: ")
            at = min(body + fault.where.byte, len(whole) - len(b"\n\n\r\n") - 1)
        await self.connection.send(whole[:at])
        await self._happen(fault, spot)
        return whole[at:]

    async def cut_reply(self, head: bytes, body: bytes) -> bytes:
        """The same for a unary answer: its head is cut for `INSIDE_CHUNK_SIZE`, its body for `INSIDE_JSON`."""
        fault = self.fault
        whole = head + body
        if fault is None or fault.where.spot not in (Spot.INSIDE_CHUNK_SIZE, Spot.INSIDE_JSON):
            return whole
        inside_head = fault.where.spot is Spot.INSIDE_CHUNK_SIZE
        at = len(head) // 2 if inside_head else min(len(head) + fault.where.byte, len(whole) - 1)
        await self.connection.send(whole[:at])
        await self._happen(fault, fault.where.spot)
        return whole[at:]

    async def _strike(self, what: What, spot: Spot) -> bool:
        match what.kind:
            case Kind.RESET:
                self.connection.abort()
            case Kind.CLOSE:
                self.connection.close()
            case Kind.GARBAGE:
                await self._garbage(spot)
            case Kind.STATUS:
                reply = _error_reply(what.code or 500)
                again = () if what.retry_after is None else ((b"retry-after", what.retry_after.encode()),)
                await self._instead(replace(reply, headers=again))
            case Kind.EMPTY_200:
                await self._empty(b"")
            case Kind.COMMENTS_ONLY:
                await self._empty(chunk(b": nothing yet\n\n") * 3)
        return False

    async def _garbage(self, spot: Spot) -> NoReturn:
        """Wrong bytes, then silence: only their content gives the fault away."""
        await self.connection.send(_GARBAGE.get(spot, _GARBAGE_EVENT if self.streaming else b"oops"))
        await trio.sleep_forever()
        raise AssertionError

    async def _instead(self, reply: Reply) -> None:
        await self.connection.send(reply_bytes(reply, self.wall(), keep=False))
        self.connection.close()

    async def _empty(self, chunks: bytes) -> None:
        if self.streaming or chunks:
            await self.connection.send(stream_head(self.wall(), keep=False) + chunks + LAST_CHUNK)
            self.connection.close()
        else:
            await self._instead(Reply(200))


def _error_reply(code: int) -> Reply:
    """500 is Starlette's plain text; the others look like the scheduler's."""
    if code == 500:
        return Reply(500, b"Internal Server Error", b"text/plain; charset=utf-8")
    return error_object(code, f"Injected status {code}")
