"""The table of the proxy's own paths, and the door that every request comes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dyn_relay.config import Config
from dyn_relay.control.auth import ADMIN, canonical, refusal
from dyn_relay.control.endpoints import BadInput, Endpoints
from dyn_relay.formats.base import Answer
from dyn_relay.http11.errors import error_body
from dyn_relay.http11.headers import Headers
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.relay.service import METHOD_NOT_ALLOWED, Relay

Handler = Callable[[Endpoints, Request, str], Answer]


@dataclass(frozen=True, slots=True)
class Route:
    """One path: its handlers by method, and whether it needs the admin's key."""

    handlers: dict[str, Handler]
    admin: bool = False


#: A path that ends in a slash takes one more segment, given to the handler as `name`.
ROUTES: dict[str, Route] = {
    "/health": Route({"GET": Endpoints.readiness}),
    "/liveness": Route({"GET": Endpoints.liveness}),
    "/readiness": Route({"GET": Endpoints.readiness}),
    "/metrics": Route({"GET": Endpoints.scrape}),
    "/workers": Route({"GET": Endpoints.list_workers, "POST": Endpoints.add_worker}, admin=True),
    "/workers/": Route(
        {"GET": Endpoints.show_worker, "POST": Endpoints.command_worker, "DELETE": Endpoints.remove_worker}, admin=True
    ),
    "/add_worker": Route({"POST": Endpoints.add_worker}, admin=True),
    "/remove_worker": Route({"POST": Endpoints.remove_worker}, admin=True),
    "/list_workers": Route({"GET": Endpoints.list_urls}, admin=True),
    "/abort_request": Route({"POST": Endpoints.abort}, admin=True),
    "/admission/explain": Route({"POST": Endpoints.explain}, admin=True),
}

#: `OPTIONS *` asks the server itself.
_SERVER = Route({})


class Door:
    """Checks keys, answers the proxy's own paths, hands the rest to the relay."""

    def __init__(self, config: Config, endpoints: Endpoints, relay: Relay) -> None:
        self._config = config
        self._endpoints = endpoints
        self._relay = relay

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
        assert answer is not None
        self._endpoints.metrics.http_requests_total(path if route else "other", f"{answer.status // 100}xx").inc()
        headers: Headers = [*answer.headers, *allow]
        if answer.body:
            headers.insert(0, (b"content-type", answer.content_type))
        await connection.respond(answer.status, headers, answer.body)

    def _odd(self, request: Request) -> Answer | None:
        """The answer to what must not reach a worker: known paths in disguise, and TRACE, which echoes credentials."""
        if request.method == "TRACE":
            return METHOD_NOT_ALLOWED
        plain = canonical(request.path)
        known = plain in ROUTES or plain in ADMIN or plain in self._relay.paths
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
