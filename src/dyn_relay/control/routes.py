"""The table of the proxy's own paths, and the door that every request comes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import trio

from dyn_relay.config import Config
from dyn_relay.control import together
from dyn_relay.control.auth import ADMIN, canonical, refusal
from dyn_relay.control.endpoints import BadInput, Endpoints
from dyn_relay.control.siblings import Siblings
from dyn_relay.formats.base import Answer
from dyn_relay.http11.errors import error_body
from dyn_relay.http11.headers import Headers
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.relay.queue import GENERATING
from dyn_relay.relay.service import METHOD_NOT_ALLOWED, Relay

Handler = Callable[[Endpoints, Request, str], Answer]
#: What the client gets, given the answers of all processes, this one's first.
Together = Callable[[Endpoints, Request, Sequence[Answer]], Answer]


@dataclass(frozen=True, slots=True)
class Route:
    """One path: its handlers by method, and whether it needs the admin's key.

    `together`: methods that are for all processes of a proxy, and what is made of their answers.
    """

    handlers: dict[str, Handler]
    admin: bool = False
    together: dict[str, Together] = field(default_factory=dict)


#: A path that ends in a slash takes one more segment, given to the handler as `name`.
ROUTES: dict[str, Route] = {
    "/health": Route({"GET": Endpoints.readiness}),
    "/liveness": Route({"GET": Endpoints.liveness}),
    "/readiness": Route({"GET": Endpoints.readiness}),
    "/metrics": Route({"GET": Endpoints.scrape}, together={"GET": together.counted}),
    "/workers": Route(
        {"GET": Endpoints.list_workers, "POST": Endpoints.add_worker},
        admin=True,
        together={"GET": together.listed, "POST": together.agreed},
    ),
    "/workers/": Route(
        {"GET": Endpoints.show_worker, "POST": Endpoints.command_worker, "DELETE": Endpoints.remove_worker},
        admin=True,
        together={"GET": together.described, "POST": together.agreed, "DELETE": together.agreed},
    ),
    "/add_worker": Route({"POST": Endpoints.add_worker}, admin=True, together={"POST": together.agreed}),
    "/remove_worker": Route({"POST": Endpoints.remove_worker}, admin=True, together={"POST": together.agreed}),
    "/list_workers": Route({"GET": Endpoints.list_urls}, admin=True),
    "/abort_request": Route({"POST": Endpoints.abort}, admin=True, together={"POST": together.aborted}),
    "/admission/explain": Route({"POST": Endpoints.explain}, admin=True),
}

#: Processes of this proxy that are missing in what was asked for.
SILENT_HEADER = b"x-dyn-relay-silent"
#: `OPTIONS *` asks the server itself.
_SERVER = Route({})


class Door:
    """Checks keys, answers the proxy's own paths, hands the rest to the relay."""

    def __init__(self, config: Config, endpoints: Endpoints, relay: Relay, siblings: Siblings | None = None) -> None:
        self._config = config
        self._endpoints = endpoints
        self._relay = relay
        self._siblings = siblings
        #: This process knows its workers.
        self.settled = trio.Event()

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        """A `http11.server.Handler`."""
        path, name = _split(request.path)
        route = _SERVER if request.target == b"*" else ROUTES.get(path)
        answer = refusal(request, self._config, admin=route is not None and route.admin) or self._odd(request)
        if answer is None and route is None:
            await self._relay.serve(connection, request)
            return
        allow: Headers = []
        if answer is None and route is not None:
            answer, allow = self._own(route, request, name)
            merge = route.together.get("GET" if request.method == "HEAD" else request.method)
            if merge is not None and answer.status != 400:
                answer = await self._together(merge, request, answer)
        assert answer is not None
        self._endpoints.metrics.http_requests_total(path if route else "other", f"{answer.status // 100}xx").inc()
        headers: Headers = [*answer.headers, *allow]
        if answer.body:
            headers.insert(0, (b"content-type", answer.content_type))
        await connection.respond(answer.status, headers, answer.body)

    async def inner(self, connection: ServerConnection, request: Request) -> None:
        """A `http11.server.Handler` for the other processes of this proxy: it answers for this one alone.

        Until it is `settled` it knows nothing, and what is to be done waits.
        """
        if not self.settled.is_set():
            if request.method == "GET":
                await connection.respond(503, [], b"")
                return
            await self.settled.wait()
        path, name = _split(request.path)
        answer, _ = self._own(ROUTES.get(path, _SERVER), request, name)
        await connection.respond(answer.status, [(b"content-type", answer.content_type), *answer.headers], answer.body)

    async def _together(self, merge: Together, request: Request, own: Answer) -> Answer:
        """The answer of all processes. One that hangs is missing from what is read, and fails what is to be done."""
        if self._siblings is None:
            return merge(self._endpoints, request, [own])
        method = "GET" if request.method == "HEAD" else request.method
        target = f"{request.path}?{request.query}" if request.query else request.path
        heard = await self._siblings.ask(method, target, request.body)
        answer = merge(self._endpoints, request, [own, *heard.answers])
        if not heard.silent:
            return answer
        names = ", ".join(map(str, heard.silent))
        if method != "GET":
            message = f"done, but not by the process {names} of this proxy, which does not answer; do it again"
            return Answer(504, error_body(504, message))
        return replace(answer, headers=[*answer.headers, (SILENT_HEADER, names.encode())])

    def _odd(self, request: Request) -> Answer | None:
        """The answer to what must not reach a worker: known paths in disguise, and TRACE, which echoes credentials."""
        if request.method == "TRACE":
            return METHOD_NOT_ALLOWED
        plain = canonical(request.path)
        known = plain in ROUTES or plain in ADMIN or plain in GENERATING or plain in self._relay.paths
        if known and plain != (request.path.rstrip("/") or "/"):
            return Answer(400, error_body(400, f"the path is {plain} in disguise"))
        return None

    def _own(self, route: Route, request: Request, name: str) -> tuple[Answer, Headers]:
        methods = sorted({*route.handlers, "OPTIONS", *(("HEAD",) if "GET" in route.handlers else ())})
        allow: Headers = [(b"allow", ", ".join(methods).encode())]
        if request.method == "OPTIONS":
            return Answer(204, b""), allow
        handler = route.handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            return METHOD_NOT_ALLOWED, allow
        try:
            return handler(self._endpoints, request, name), []
        except BadInput as exc:
            return Answer(400, error_body(400, str(exc))), []


def _split(path: str) -> tuple[str, str]:
    """The route's key and what follows it: `/workers/w1` -> `/workers/`, `w1`. A trailing slash is no segment."""
    trimmed = path.rstrip("/") or "/"
    if trimmed in ROUTES:
        return trimmed, ""
    for key in ROUTES:
        if key.endswith("/") and trimmed.startswith(key):
            return key, trimmed[len(key) :]
    return trimmed, ""
