"""What each of the proxy's endpoints does. Shapes are those that SMG's, SGLang's and miles' clients parse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.worker import State, Worker
from dyn_relay.formats.base import Answer
from dyn_relay.http11.server import Drain, Request
from dyn_relay.observe.metrics import CONTENT_TYPE, Metrics
from dyn_relay.relay.explain import described
from dyn_relay.relay.service import Relay


class BadInput(Exception):
    """The request cannot be understood; the message names the field."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The handlers, one method each; `routes.py` says which paths lead here."""

    fleet: Fleet
    relay: Relay
    metrics: Metrics
    draining: Drain

    def liveness(self, request: Request, name: str) -> Answer:
        """200 while the process serves at all."""
        return Answer(200, b"")

    def readiness(self, request: Request, name: str) -> Answer:
        """200 while new requests are taken and some worker can take them, else 503."""
        ready = not self.draining.is_set() and any(worker.state is State.READY for worker in self.fleet.workers)
        return Answer(200 if ready else 503, b"")

    def scrape(self, request: Request, name: str) -> Answer:
        """Prometheus."""
        return Answer(200, self.metrics.render(), CONTENT_TYPE.encode())

    def list_workers(self, request: Request, name: str) -> Answer:
        """`{"workers": [...]}`."""
        return _json(200, {"workers": [_describe(worker) for worker in self.fleet.workers]})

    def list_urls(self, request: Request, name: str) -> Answer:
        """`{"urls": [...]}`, as older routers answer."""
        return _json(200, {"urls": [worker.url for worker in self.fleet.workers]})

    def show_worker(self, request: Request, name: str) -> Answer:
        """One worker by id or URL."""
        worker = self.fleet.get(unquote(name))
        return _json(200, _describe(worker)) if worker else _unknown(name)

    def add_worker(self, request: Request, name: str) -> Answer:
        """`{"url": ...}` in the body or `?url=`: 202 with the worker, the same one if it is known."""
        try:
            worker = self.fleet.add(_url(request))
        except ValueError as exc:
            raise BadInput(f"url: {exc}") from None
        return _json(202, _describe(worker))

    def remove_worker(self, request: Request, name: str) -> Answer:
        """By id or URL in the path, or `?url=`: no new attempts from now on; live ones end in peace."""
        name = unquote(name) or _url(request)
        try:
            worker = self.fleet.remove(name)
        except KeyError:
            return _unknown(name)
        return _json(202, _describe(worker))

    def abort(self, request: Request, name: str) -> Answer:
        """`{"rid": ..., "abort_all": ...}`: always 200 and empty, as SGLang answers, once the body is understood."""
        fields = _object(request)
        rid, everything = fields.get("rid"), fields.get("abort_all", False)
        if rid is not None and not isinstance(rid, str):
            raise BadInput("rid: must be a string")
        if not isinstance(everything, bool):
            raise BadInput("abort_all: must be true or false")
        if rid or everything:
            self.relay.abort(rid or "", everything=everything)
        return Answer(200, b"")

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
        return _json(200, described(found, traits, worker.url if worker else None, int(after)))


#: Of its traits, what decides who gets a request, and who goes on with it; null: it does not say.
_SHOWN = ("text", "incremental", "max_input", "deterministic", "routed_experts", "indexer_topk", "sampling_defaults")


def _describe(worker: Worker) -> dict[str, object]:
    traits = worker.traits
    return {
        "id": worker.id,
        "url": worker.url,
        "is_healthy": worker.state is State.READY,
        "state": worker.state.value,
        "cause": worker.cause,
        "load": worker.load,
        "served": worker.served,
        "failures": worker.failures,
        "model_id": traits.model,
        "version": traits.version,
        "weight_version": traits.weight_version,
        "traits": {name: getattr(traits, name) for name in _SHOWN},
    }


def _url(request: Request) -> str:
    """The worker's URL: `?url=`, or `url` or `worker_url` in the body. Raises `BadInput`."""
    query = parse_qs(request.query)
    url: object = query.get("url", [None])[0]
    if url is None and request.body:
        fields = _object(request)
        url = fields.get("url", fields.get("worker_url"))
    if not isinstance(url, str) or not url:
        raise BadInput("url: a worker's URL is needed")
    return url


def _object(request: Request) -> dict[str, Any]:
    try:
        return msgspec.json.decode(request.body or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise BadInput(f"body: {exc}") from None


def _unknown(name: str) -> Answer:
    return _json(404, {"error": {"message": f"no worker {name!r}", "code": 404}})


def _json(status: int, value: object) -> Answer:
    return Answer(status, msgspec.json.encode(value))
