"""Many clients at once, each answer checked token by token, and the whole run by all checkers of the testkit."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

from dyn_testkit import checkers
from dyn_testkit.client import Response, fetch
from dyn_testkit.history import Arrival, End, History, Order, Run, Sample
from dyn_testkit.oracle import Oracle
from dyn_testkit.simulation.clients import Clients
from dyn_testkit.simulation.run import reference
from dyn_testkit.simulation.scenario import RequestPlan
from tests.relay.harness import World


def plans(count: int, tokens: int, *, each: float = 0.0, **sampling: Any) -> list[RequestPlan]:
    """Requests for about `tokens` tokens, half of them streams, one every `each` seconds."""
    made = []
    for number in range(count):
        params = {"max_new_tokens": tokens - number % 7, "temperature": 0, "ignore_eos": True, **sampling}
        body = {
            "rid": f"request-{number:04d}",
            "input_ids": [number // 256, number % 256, 5],
            "sampling_params": params,
            "return_logprob": True,
            "stream": number % 2 == 0,
        }
        made.append(RequestPlan(f"{number:04d}", number * each, body))
    return made


async def crowd(
    w: World, oracle: Oracle, requests: Sequence[RequestPlan], meanwhile: Callable[[], Awaitable[None]]
) -> History:
    """Send them all and do `meanwhile`; what came of it, once nothing is under way. The world needs trio's clock."""
    history, clients, began = History(), Clients(), trio.current_time()

    async def ask(request: RequestPlan) -> None:
        await trio.sleep_until(began + request.at)
        history.add(await clients.run(request, w.network, w.url))

    async with trio.open_nursery() as nursery:
        for request in requests:
            history.add(reference(oracle, request))
            nursery.start_soon(ask, request)
        await meanwhile()
    await w.quiet()
    await trio.sleep(1)  # orders are under way
    history.run = Run(traced=True, tapped=True)
    history.rows = [dict(row) for row in w.rows]
    for worker in w.workers:
        for recorded in worker.requests:
            body = recorded.json() if recorded.path in ("/generate", "/abort_request") else {}
            if recorded.path == "/generate":
                history.arrivals.append(Arrival(worker.url, recorded.at, body, worker.made.get(body["rid"])))
            elif recorded.path == "/abort_request":
                history.orders.append(Order(worker.url, recorded.at, body.get("rid", "")))
    history.samples = [Sample(trio.current_time(), dict(w.gauges))]
    history.end = End()
    return history


def wrong(history: History) -> list[str]:
    """What any checker finds, and every request that did not get its whole answer. Empty: no client saw anything."""
    found = [f"{finding.key}: {finding.check}: {finding.message}" for finding in checkers.check(history)]
    failed = [row["rid"] for row in history.rows if row["outcome"] not in ("done", "completed_here")]
    broken = [record.key for record in history.records.values() if record.error or record.status != 200]
    return [*found, *(f"{one}: failed" for one in itertools.chain(failed, broken))]


async def order(w: World, path: str, body: Any = None, method: str = "POST") -> Response:
    """One of the proxy's own endpoints."""
    return await fetch(w.network, w.url, path, body, method=method)


async def listed(w: World) -> dict[str, Any]:
    """The workers that the proxy lists, by id."""
    return {worker["id"]: worker for worker in (await order(w, "/workers", method="GET")).json()["workers"]}
