"""Makes the fault of one call happen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import trio

from dyn_relay.grpc.status import Code
from dyn_testkit.faults import Kind, Spot, What
from dyn_testkit.grpc import MAX_MESSAGE, Call, frame
from dyn_testkit.worker.inject import Injector

#: Tokens of a message that is all of an answer.
WHOLE = -1
#: Of a length-prefixed message: bytes before the message itself.
_PREFIX = 5
#: What no HTTP/2 may have, DATA on stream 0; no length prefix; and no protobuf: a tag of a type that does not exist.
_NOT_HTTP2 = b"\x00\x00\x01\x00\x00\x00\x00\x00\x00?"
_NOT_A_PREFIX = b"\xff\xff\xff\xff\xff"
_NOT_PROTOBUF = b"\x0f\xff\xff"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcInjector(Injector):
    """Strikes an answer over gRPC.

    `INSIDE_CHUNK_SIZE` is inside the prefix of a message, `INSIDE_JSON` inside the message itself. `AFTER_FINISH` and
    `BEFORE_LAST_CHUNK` are the same place: the last message is out, the status is not.
    """

    call: Call
    #: Bytes of the cut message that are still to come.
    rest: int = 0

    async def cut(self, spot: Spot, sent: int, total: int, framed: bytes) -> bytes:
        """Filter the bytes of a message that carries tokens `sent + 1 .. total` (`WHOLE`: any).

        Returns what is still to be sent: all of it if no fault lands inside.
        """
        fault = self.fault if total == WHOLE else self.lands(spot, sent, total)
        if fault is None or fault.where.spot is not spot:
            return framed
        at = _PREFIX // 2 if spot is Spot.INSIDE_CHUNK_SIZE else min(_PREFIX + fault.where.byte, len(framed) - 1)
        await self.call.send_raw(framed[:at])
        await replace(self, rest=len(framed) - at)._happen(fault, spot)
        return framed[at:]

    async def _strike(self, what: What, spot: Spot) -> bool:
        call = self.call
        match what.kind:
            case Kind.RESET | Kind.CLOSE:
                call.wire.cut(reset=what.kind is Kind.RESET)
            case Kind.GARBAGE:
                await self._garbage(spot)
            case Kind.STATUS:
                await call.refuse(what.code or 500)
            case Kind.EMPTY_200 | Kind.COMMENTS_ONLY:
                await call.finish(Code.OK)
            case Kind.GRPC_STATUS:
                code = Code(what.code or 0)
                await call.finish(code, f"Injected status {code.name}")
            case Kind.RST_STREAM:
                await call.reset(what.code or 0)
            case Kind.GOAWAY:
                await call.wire.go_away(code=what.code or 0)
                call.wire.cut()
            case Kind.DRAIN:
                await call.wire.go_away()
                return True
            case Kind.UNPROCESSED:
                await call.wire.go_away(call.stream - 2)
            case Kind.NO_TRAILERS:
                await call.end_without_status()
            case Kind.BAD_LENGTH | Kind.TRUNCATED | Kind.COMPRESSED | Kind.NOT_PROTOBUF:
                await call.send_raw(_malformed(what.kind))
                await call.finish(Code.OK)
        return False

    async def _garbage(self, spot: Spot) -> None:
        """Wrong bytes, then silence: only their content gives the fault away."""
        match spot:
            case Spot.AT_HEAD | Spot.AFTER_DONE:
                self.call.wire.say(_NOT_HTTP2)
            case Spot.INSIDE_CHUNK_SIZE:
                await self.call.send_raw(_NOT_A_PREFIX)
            case Spot.INSIDE_JSON:
                await self.call.send_raw(b"\xff" * self.rest)
            case _:
                await self.call.send_raw(frame(_NOT_PROTOBUF))
        await trio.sleep_forever()


def _malformed(kind: Kind) -> bytes:
    match kind:
        case Kind.BAD_LENGTH:
            return frame(_NOT_PROTOBUF, length=MAX_MESSAGE + 1)
        case Kind.TRUNCATED:
            return frame(_NOT_PROTOBUF, length=len(_NOT_PROTOBUF) + 1)
        case Kind.COMPRESSED:
            return frame(b"\x00", compressed=True)
        case _:
            return frame(_NOT_PROTOBUF)
