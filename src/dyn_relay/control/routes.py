"""The table of the proxy's own paths, and the door that every request comes through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import trio

from dyn_relay.config import Config
from dyn_relay.control import together
from dyn_relay.control.admin import ADMIN, CONTINUE, FOR_ONE, ONE_ENGINES, ORDERS, PAUSE
from dyn_relay.control.asked import BadInput
from dyn_relay.control.auth import canonical, refusal
from dyn_relay.control.endpoints import Endpoints
from dyn_relay.control.everyone import LOADS
from dyn_relay.control.siblings import PAUSED, RELEARN, TOLD, Siblings, missing
from dyn_relay.formats.base import Answer
from dyn_relay.http11.errors import error_body
from dyn_relay.http11.headers import Headers
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.relay.queue import GENERATING
from dyn_relay.relay.service import METHOD_NOT_ALLOWED, Relay

#: Some ask the workers.
Handler = Callable[[Endpoints, Request, str], Answer | Awaitable[Answer]]
#: What the client gets, given the answers of all processes, this one's first.
Together = Callable[[Endpoints, Request, Sequence[Answer]], Answer]


@dataclass(frozen=True, slots=True)
class Route:
    """One path: its handlers by method, and whether it needs the admin's key (those of `ADMIN` need it anyway).

    `head`: a HEAD is a GET without the answer's body. Not so where a GET is an order.
    `together`: methods that are for all processes of a proxy, and what is made of their answers.
    """

    handlers: dict[str, Handler]
    admin: bool = False
    head: bool = True
    together: dict[str, Together] = field(default_factory=dict)


#: `*` stands for a part that is given to the handler as `name`.
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
    "/workers/*": Route(
        {"GET": Endpoints.show_worker, "PUT": Endpoints.put_worker, "DELETE": Endpoints.remove_worker},
        admin=True,
        together={"GET": together.described, "PUT": together.agreed, "DELETE": together.agreed},
    ),
    "/workers/*/drain": Route({"POST": Endpoints.drain_worker}, admin=True, together={"POST": together.agreed}),
    "/workers/*/admit": Route({"POST": Endpoints.admit_worker}, admin=True, together={"POST": together.agreed}),
    "/add_worker": Route({"POST": Endpoints.add_worker}, admin=True, together={"POST": together.agreed}),
    "/remove_worker": Route({"POST": Endpoints.remove_worker}, admin=True, together={"POST": together.agreed}),
    "/list_workers": Route({"GET": Endpoints.list_urls}, admin=True),
    "/abort_request": Route({"POST": Endpoints.abort}, admin=True, together={"POST": together.aborted}),
    "/admission/explain": Route({"POST": Endpoints.explain}, admin=True),
    "/ready": Route({"GET": Endpoints.unpaused}),
    LOADS: Route({"GET": Endpoints.loads}),
    "/get_loads": Route({"GET": Endpoints.loads}),
    **{path: Route(dict.fromkeys(order.methods, Endpoints.order), head=False) for path, order in ORDERS.items()},
    **{
        f"/workers/*{path}": Route(
            dict.fromkeys(order.methods, partial(Endpoints.order_one, path=path)), admin=True, head=False
        )
        for path, order in FOR_ONE.items()
    },
    PAUSE: Route({"POST": Endpoints.pause}),
    CONTINUE: Route({"POST": Endpoints.go_on}),
    **{
        path: Route(dict.fromkeys(one.methods, partial(Endpoints.refuse, why=one.why)), admin=True, head=False)
        for path, one in ONE_ENGINES.items()
    },
}

#: Processes of this proxy that are missing in what was asked for.
SILENT_HEADER = b"x-dyn-relay-silent"
#: What only the other processes of this proxy may say.
_INNER = {
    PAUSED: Route({"PUT": Endpoints.hold, "DELETE": Endpoints.let_go_on}),
    RELEARN: Route({"POST": Endpoints.relearn}),
    TOLD: Route({"GET": Endpoints.tell}),
}
#: Those with such a part, the longest first.
_OPEN_ENDED = sorted((key for key in ROUTES if "*" in key), key=len, reverse=True)
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
            answer, allow = await self._own(route, request, name)
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
        answer, _ = await self._own(_INNER.get(path) or ROUTES.get(path, _SERVER), request, name)
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
        if method != "GET":
            # Who is at odds must be told first: to do it again would not help.
            return answer if answer.status == 409 else missing(heard.silent)
        return replace(answer, headers=[*answer.headers, (SILENT_HEADER, ", ".join(map(str, heard.silent)).encode())])

    def _odd(self, request: Request) -> Answer | None:
        """The answer to what must not reach a worker: known paths in disguise, and TRACE, which echoes credentials."""
        if request.method == "TRACE":
            return METHOD_NOT_ALLOWED
        plain = canonical(request.path)
        key, _ = _split(plain)
        known = key in ROUTES or key in ADMIN or key in GENERATING or key in self._relay.paths
        if known and key != _split(request.path)[0]:
            return Answer(400, error_body(400, f"the path is {plain} in disguise"))
        return None

    async def _own(self, route: Route, request: Request, name: str) -> tuple[Answer, Headers]:
        head = {"HEAD"} if route.head and "GET" in route.handlers else set()
        methods = sorted({*route.handlers, "OPTIONS", *head})
        allow: Headers = [(b"allow", ", ".join(methods).encode())]
        if request.method == "OPTIONS":
            return Answer(204, b""), allow
        handler = route.handlers.get("GET" if request.method in head else request.method)
        if handler is None:
            return METHOD_NOT_ALLOWED, allow
        try:
            answer = handler(self._endpoints, request, name)
            return (answer if isinstance(answer, Answer) else await answer), []
        except BadInput as exc:
            return Answer(400, error_body(400, str(exc))), []


@lru_cache(maxsize=128)
def _split(path: str) -> tuple[str, str]:
    """The route's key and what is its own: `/workers/w1` -> `/workers/*`, `w1`. A trailing slash is no segment."""
    trimmed = path.rstrip("/") or "/"
    if trimmed in ROUTES:
        return trimmed, ""
    for key in _OPEN_ENDED:
        before, _, after = key.partition("*")
        if trimmed.startswith(before) and trimmed.endswith(after) and len(trimmed) > len(before + after):
            return key, trimmed[len(before) : len(trimmed) - len(after)]
    return trimmed, ""
