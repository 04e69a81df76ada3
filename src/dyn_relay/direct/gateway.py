"""One gRPC engine as an HTTP server: the handler of its requests (`http11.server.serve` calls it)."""

from __future__ import annotations

import msgspec
import structlog
import trio

from dyn_relay.direct.answer import NotAnAnswer
from dyn_relay.direct.control import ROUTES, Control
from dyn_relay.direct.engine import Engine
from dyn_relay.direct.errors import JSON, Meaning, answer, meaning, refused, trouble
from dyn_relay.direct.generate import Broken, Generation
from dyn_relay.direct.numbers import CannotCarry
from dyn_relay.direct.request import translate
from dyn_relay.direct.tunnel import Tunnel
from dyn_relay.grpc.channels import Newer
from dyn_relay.grpc.metadata import Metadata, sendable
from dyn_relay.grpc.status import CallFailed, TooLarge
from dyn_relay.http11.errors import BadResponse, error_body
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.net import ConnectFailed, ConnectionBroken

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("direct")

GENERATE = "/generate"
#: Told to both servers of an engine: each knows by name only what has come through it.
ABORT = "/abort_request"
_GENERATE_METHODS = ("POST", "PUT")
#: Headers of a request that are told to the engine beside it.
_TOLD = (b"authorization", b"x-request-id")


class Gateway:
    """Shows `engine` over HTTP. `tunnel`: where what gRPC cannot carry is sent instead; None: it is refused by name."""

    def __init__(self, engine: Engine, name: str, tunnel: Tunnel | None = None) -> None:
        self.engine = engine
        self._name = name
        self._tunnel = tunnel

    async def __call__(self, served: ServerConnection, request: Request) -> None:
        """Answer one request, and drop the call if its client leaves meanwhile. Raises `ConnectionBroken`.

        The connection is closed after it: an idle one would say nothing of the engine, which may have died meanwhile.
        """
        served.drain()
        errors: list[Exception] = []
        gone = False

        async def watch() -> None:
            nonlocal gone
            await served.connection.wait_closed()
            gone = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            try:
                await self._answer(served, request)
            except Exception as exc:  # carried out of the nursery as it is
                errors.append(exc)
            nursery.cancel_scope.cancel()
        if gone and not served.complete:
            raise ConnectionBroken("the client has left")
        if errors and isinstance(errors[0], Broken):
            log.debug("engine lost", engine=self._name, path=request.path, cause=str(errors[0]))
            served.break_off()
            raise ConnectionBroken(str(errors[0]))
        if errors:
            raise errors[0]

    async def _answer(self, served: ServerConnection, request: Request) -> None:
        path = request.path.rstrip("/") or "/"
        try:
            try:
                await self._route(served, request, path)
            except CannotCarry as exc:
                await self._otherwise(served, request, 400, str(exc))
            except TooLarge as exc:
                await self._otherwise(served, request, 400, f"body: {exc}")
        except (ConnectFailed, CallFailed) as exc:
            if served.started or meaning(exc) in (Meaning.DEATH, Meaning.ABORTED):
                raise Broken(str(exc)) from exc
            said = answer(exc)
            await served.respond(said.status, JSON, said.body)
        except (NotAnAnswer, BadResponse, msgspec.MsgspecError) as exc:
            raise Broken(f"{path}: {exc}") from exc

    async def _route(self, served: ServerConnection, request: Request, path: str) -> None:
        # A client's odd request id must not look like an engine that fails; an odd key opens nothing anyway.
        metadata = [field for field in request.headers if field[0] in _TOLD and sendable(field[1])]
        allowed = _GENERATE_METHODS if path == GENERATE else ROUTES[path][0] if path in ROUTES else None
        if allowed is None:
            await self._otherwise(served, request, 501, f"{path}: SGLang's gRPC service has no method for it")
        elif request.method not in allowed:
            await served.respond(405, JSON, msgspec.json.encode({"detail": "Method Not Allowed"}))
        elif path == GENERATE:
            await self._generate(served, request, metadata)
        else:
            reply = await ROUTES[path][1](Control(self.engine, request, metadata))
            if path == ABORT and self._tunnel is not None:
                await self._tunnel.tell(request, (await self.engine.facts()).http_port)
            await served.respond(reply.status, list(reply.headers), reply.body)

    async def _generate(self, served: ServerConnection, request: Request, metadata: Metadata) -> None:
        try:
            body = msgspec.json.decode(request.body, type=dict[str, object])
        except (msgspec.MsgspecError, RecursionError) as exc:
            await served.respond(400, JSON, error_body(400, f"body: {exc}"))
            return
        while True:
            facts = await self.engine.facts(metadata)
            asked = translate(body, request.headers, tokenizer=facts.tokenizer)
            try:
                await Generation(self.engine, facts, asked, metadata, served).run()
                return
            except Newer:
                continue  # perhaps another process, which is to be asked otherwise

    async def _otherwise(self, served: ServerConnection, request: Request, status: int, why: str) -> None:
        """What gRPC cannot carry goes over HTTP if that may be, and else nowhere."""
        if self._tunnel is not None:
            end = self._tunnel.end((await self.engine.facts()).http_port)
            if end is not None:
                try:
                    await self._tunnel.take(served, request, end)
                    return
                except ConnectFailed as exc:
                    await self.engine.well()  # raises if the engine is gone: then it is not for HTTP to say
                    why = f"{why}; nor be sent over HTTP: {exc}"
        said = refused(why) if status == 400 else trouble(status, why)
        await served.respond(said.status, JSON, said.body)
