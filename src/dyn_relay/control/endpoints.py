"""What each of the proxy's endpoints does. Shapes are those that SMG's, SGLang's and miles' clients parse."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, unquote

import trio

from dyn_relay.control import everyone
from dyn_relay.control.admin import ORDERS
from dyn_relay.control.asked import (
    LEASE,
    PART,
    URLS,
    BadInput,
    fields_of,
    instance_of,
    nothing_but,
    only_url_of,
    origin_of,
    part_of,
    said,
    seconds_of,
    url_of,
)
from dyn_relay.control.siblings import PAUSED, RELEARN, Siblings, missing
from dyn_relay.control.told import tell
from dyn_relay.control.totals import Pages
from dyn_relay.fleet.discovery.discovery import Discovery
from dyn_relay.fleet.discovery.leased import Leased
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.stage import Named
from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import Role, State, Worker
from dyn_relay.formats.base import Answer
from dyn_relay.http11.errors import error_body
from dyn_relay.http11.headers import get
from dyn_relay.http11.server import Drain, Request
from dyn_relay.observe.metrics import CONTENT_TYPE, Metrics
from dyn_relay.relay.departures import Departures
from dyn_relay.relay.explain import described
from dyn_relay.relay.orders import Said
from dyn_relay.relay.service import Relay

#: Whose page of metrics it is.
PROCESS_HEADER = b"x-dyn-relay-process"
#: Seconds.
LONGEST_LEASE = 3600.0
#: The type of what has none.
_UNKNOWN = b"application/octet-stream"
_SECONDS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)s?")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The handlers, one method each; `routes.py` says which paths lead here."""

    fleet: Fleet
    discovery: Discovery
    leased: Leased
    relay: Relay
    metrics: Metrics
    draining: Drain
    departures: Departures
    #: Of a proxy that is several processes.
    pages: Pages | None = None
    siblings: Siblings | None = None

    def liveness(self, request: Request, name: str) -> Answer:
        """200 while the process serves at all."""
        return Answer(200, b"")

    def readiness(self, request: Request, name: str) -> Answer:
        """200 while new requests are taken and some worker can take them, else 503."""
        able = self.fleet.able
        ready = able and not self.draining.is_set()
        return Answer(200 if ready else 503, b"")

    def unpaused(self, request: Request, name: str) -> Answer:
        """As `readiness`, and 503 in a pause, as SGLang's own `/ready`."""
        return Answer(503, b"") if self.fleet.paused else self.readiness(request, name)

    def scrape(self, request: Request, name: str) -> Answer:
        """Prometheus: this process's own page."""
        page = self.metrics.render()
        if self.pages is None:
            return Answer(200, page, CONTENT_TYPE.encode())
        self.pages.keep(page)
        return Answer(200, page, CONTENT_TYPE.encode(), [(PROCESS_HEADER, self.pages.name.encode())])

    def list_workers(self, request: Request, name: str) -> Answer:
        """`{"workers": [...]}`."""
        workers = [_describe(worker) for worker in self.fleet.workers]
        return Answer.of(200, {"workers": workers, "paused": self.fleet.paused})

    def list_urls(self, request: Request, name: str) -> Answer:
        """`{"urls": [...]}`, as older routers answer."""
        return Answer.of(200, {"urls": [worker.url for worker in self.fleet.workers]})

    def show_worker(self, request: Request, name: str) -> Answer:
        """One worker by id or URL."""
        worker = self.fleet.get(unquote(name))
        return Answer.of(200, _describe(worker)) if worker else _unknown(name)

    def add_worker(self, request: Request, name: str) -> Answer:
        """`{"url": ...}` in the body or `?url=`: 202 with the worker, the same one if it is known.

        With `lease_secs` it names itself: see `_lease`.
        """
        if said(request, "lease_secs") is not None:
            return self._lease(request)
        return Answer.of(202, _describe(self._named(request)))

    def _lease(self, request: Request) -> Answer:
        """`{"url", "lease_secs", "instance"}`: it is in the fleet for so many seconds, unless it says so again.

        0: no longer; what still runs there after `after` seconds, if that is given, goes on elsewhere. 404 if it had no
        lease. 409: somebody has let it leave, and it stays away for as long as that instance renews.
        """
        seconds, after = seconds_of(request, "lease_secs", LONGEST_LEASE), seconds_of(request, "after", math.inf)
        assert seconds is not None
        nothing_but(request, ("url", *PART, *LEASE), (*URLS, *PART, *LEASE), "no worker has such a thing")
        origin, instance = origin_of(url := url_of(request)), instance_of(request)
        if not seconds:
            worker = self.fleet.get(url)
            if not self.leased.give_back(origin, instance) or worker is None:
                return _unknown(url)
            if after is not None and self.fleet.leaving(worker):
                self.departures.begin(worker, after)
            return Answer.of(202, _describe(worker))
        role, port = part_of(request)
        try:
            self.leased.renew(Named(origin, role, port, instance=instance), seconds)
        except ValueError as exc:
            raise BadInput(f"worker_type: {exc}") from None
        worker = self.fleet.get(url)
        if worker is None or self.leased.name not in worker.named_by:
            words = f"{url} was told to leave: add it again, or let its lease end first"
            return Answer(409, error_body(409, words))
        return Answer.of(202, _describe(worker))

    def put_worker(self, request: Request, name: str) -> Answer:
        """`{"url": ...}`, its own: 202, and it is taken back if it was leaving. Nothing else of it can be set."""
        url = only_url_of(request)
        worker = self.fleet.get(unquote(name))
        if worker is None and not self.fleet.is_name_of(unquote(name), url):
            return _unknown(name)
        if worker is not None and self.fleet.get(url) is not worker:
            raise BadInput(f"url: {worker.id} is {worker.url}; add another worker, and let this one leave")
        # One that is gone here, since none of its requests was this process's, is added.
        return Answer.of(202, _describe(self._named(request)))

    def _named(self, request: Request) -> Worker:
        """The worker that a request names, in the fleet from now on. Raises `BadInput`."""
        origin_of(url := only_url_of(request))
        role, port = part_of(request)
        try:
            return self.fleet.add(url, role=role, bootstrap_port=port)
        except ValueError as exc:
            raise BadInput(f"worker_type: {exc}") from None

    def remove_worker(self, request: Request, name: str) -> Answer:
        """By id or URL in the path, or `?url=`: no new attempts from now on; live ones end in peace."""
        nothing_but(request, ("url",), URLS, "only a worker's url can be given; /workers/{id}/drain has ?after=")
        return self._let_go(unquote(name) or url_of(request), math.inf)

    def drain_worker(self, request: Request, name: str) -> Answer:
        """The same; `?after=30s` (or `30`): what still runs there then goes on elsewhere. 0: at once."""
        nothing_but(request, ("after",), (), "a drain has nothing but ?after=")
        after = parse_qs(request.query, keep_blank_values=True).get("after", [""])[-1]
        seconds = _SECONDS.fullmatch(after)
        if after and seconds is None:
            raise BadInput(f"after: must be seconds, as 30s or 30, not {after!r}")
        return self._let_go(unquote(name), float(seconds[1]) if seconds else math.inf)

    def _let_go(self, name: str, after: float) -> Answer:
        try:
            worker = self.fleet.remove(name)
        except KeyError:
            return _unknown(name)
        if after < math.inf:
            self.departures.begin(worker, after)
        else:
            self.departures.forget(worker)
        return Answer.of(202, _describe(worker))

    def admit_worker(self, request: Request, name: str) -> Answer:
        """It may serve with the weights that it has, or comes back with."""
        try:
            return Answer.of(200, _describe(self.fleet.admit(unquote(name))))
        except KeyError:
            return _unknown(name)

    # -- for all workers: see `everyone.py`

    async def order(self, request: Request, name: str) -> Answer:
        """Every worker is told; 200 if all have obeyed."""
        return everyone.done(await self._told(request))

    async def order_one(self, request: Request, name: str, path: str) -> Answer:
        """One worker, by id or URL, is told: its own answer, as it came; 502 if there is none."""
        worker = self.fleet.get(unquote(name))
        if worker is None:
            return _unknown(name)
        [one] = await self.relay.tell_all(replace(request, path=path), ORDERS[path].timeout, [worker])
        if one.answer is None:
            return Answer(502, error_body(502, f"{worker.id}: {one.error}"))
        return Answer(one.answer.status, one.answer.body, get(one.answer.headers, b"content-type") or _UNKNOWN)

    async def pause(self, request: Request, name: str) -> Answer:
        """The same; no attempt begins from before they are told on, unless none of them obeys."""
        already = self.fleet.paused
        silent = await self._pause(True)
        said = await self._told(request)
        if not already and not any(one.ok for one in said):
            silent = await self._pause(False)
        return missing(silent) if silent else everyone.done(said)

    async def go_on(self, request: Request, name: str) -> Answer:
        """The same; attempts begin as soon as one of them has obeyed."""
        said = await self._told(request)
        silent = await self._pause(False) if any(one.ok for one in said) else ()
        return missing(silent) if silent else everyone.done(said)

    async def _pause(self, on: bool) -> Sequence[int]:
        """In all processes; which of them do not answer."""
        if on:
            self.relay.pause()
        else:
            self.relay.go_on()
        if self.siblings is None:
            return ()
        heard = await self.siblings.ask("PUT" if on else "DELETE", PAUSED, b"")
        return heard.silent

    async def loads(self, request: Request, name: str) -> Answer:
        """What all workers have to do, as SGLang's `/v1/loads`; the query goes to them."""
        if parse_qs(request.query).get("format", ["json"])[-1] != "json":
            raise BadInput("format: must be json; /metrics of each worker has the other")
        dead = frozenset(worker.id for worker in self.fleet.workers if worker.state is State.DEAD)
        question = replace(request, method="GET", path=everyone.LOADS)
        said = await self.relay.tell_all(question, everyone.LOADS_TIMEOUT, self.fleet.workers, once=False)
        return everyone.loads(said, dead)

    async def _told(self, request: Request) -> list[Said]:
        order = ORDERS[request.path.rstrip("/")]
        said = await self.relay.tell_all(request, order.timeout, self.fleet.workers)
        if order.renews:
            await self.fleet.relearn(one.worker for one in said if one.ok)
            if self.siblings is not None:
                await self.siblings.ask("POST", RELEARN, b"")
        return said

    def refuse(self, request: Request, name: str, why: str) -> Answer:
        """What only one engine can be told."""
        raise BadInput(f"{request.path}: {why}; ask that one (GET /workers has its URL)")

    # -- of requests

    def abort(self, request: Request, name: str) -> Answer:
        """`{"rid": ..., "abort_all": ...}`: `{"aborted": N}`, requests that are live in this process.

        A client gets what SGLang answers, always 200 and empty, once the body is understood.
        """
        rid, everything = abort_of(request)
        return Answer.of(200, {"aborted": self.relay.abort(rid, everything=everything)})

    def explain(self, request: Request, name: str) -> Answer:
        """What would become of the request in the body; `?after=` tokens (1), `?worker=` an id or URL (a stock one)."""
        query = parse_qs(request.query, keep_blank_values=True)
        after, name = query.get("after", ["1"])[-1], query.get("worker", [""])[-1]
        if not (after.isascii() and after.isdigit() and len(after) < 20):
            raise BadInput(f"after: must be a whole number of tokens, not {after!r}")
        worker = self.fleet.get(name) if name else None
        if name and worker is None:
            return _unknown(name)
        traits = worker.traits if worker else self.relay.stock
        try:
            found = self.relay.explain(request, traits, int(after))
        except ValueError as exc:
            raise BadInput(str(exc)) from None
        return Answer.of(200, described(found, traits, worker.url if worker else None, int(after)))

    # -- of one process to the others

    def tell(self, request: Request, name: str) -> Answer:
        """What one that takes another's place must know, see `told.py`."""
        return Answer.of(200, tell(self.fleet, self.discovery, self.leased))

    def hold(self, request: Request, name: str) -> Answer:
        """No attempt is to begin; the workers know."""
        self.relay.pause()
        return Answer(200, b"")

    def let_go_on(self, request: Request, name: str) -> Answer:
        """The end of that."""
        self.relay.go_on()
        return Answer(200, b"")

    def relearn(self, request: Request, name: str) -> Answer:
        """What workers tell of themselves may have changed; it is read soon."""
        self.relay.relearn()
        return Answer(200, b"")


def abort_of(request: Request) -> tuple[str, bool]:
    """Which rids an abort means ("": none), and whether it means everything. Raises `BadInput`."""
    fields = fields_of(request)
    rid, everything = fields.get("rid"), fields.get("abort_all", False)
    if rid is not None and not isinstance(rid, str):
        raise BadInput("rid: must be a string")
    if not isinstance(everything, bool):
        raise BadInput("abort_all: must be true or false")
    return rid or "", everything


#: Of its traits, what decides who gets a request, and who goes on with it; null: it does not say.
_SHOWN = (
    "role",
    "text",
    "incremental",
    "max_input",
    "deterministic",
    "routed_experts",
    "indexer_topk",
    "sampling_defaults",
    "dp_size",
    "kv_events",
    "tool_call_parser",
    "reasoning_parser",
)


def _describe(worker: Worker) -> dict[str, object]:
    traits = worker.traits
    port = worker.bootstrap_port or traits.bootstrap_port
    worker.recount()
    return {
        "id": worker.id,
        "url": worker.url,
        "named_by": sorted(worker.named_by),
        "worker_type": worker.role.value,
        "joins_as": worker.renamed.role.value if worker.renamed and worker.wanted else None,
        "bootstrap_port": port if worker.role is Role.PREFILL else None,
        "disputed": False,
        "misplaced": worker.misplaced,
        "is_healthy": worker.healthy and not worker.misplaced,
        "state": worker.state.value,
        "cause": worker.cause,
        "since": round(trio.current_time() - worker.since, 3),
        "load": worker.load,
        "in_flight": worker.in_flight,
        "targets": [_load(target) for target in worker.targets],
        "served": worker.served,
        "failures": worker.failures,
        "model_id": traits.model,
        "version": traits.version,
        "weight_version": traits.weight_version,
        "traits": {name: getattr(traits, name) for name in _SHOWN},
    }


def _load(target: Target) -> dict[str, object]:
    return {
        "id": target.id,
        "dp_rank": target.rank,
        "in_flight": target.in_flight,
        "load": target.load,
        "tokens": target.tokens,
    }


def _unknown(name: str) -> Answer:
    return Answer.of(404, {"error": {"message": f"no worker {name!r}", "code": 404}})
