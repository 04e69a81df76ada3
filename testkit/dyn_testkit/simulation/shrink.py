"""The smallest plan that still fails: fewer faults, fewer requests, earlier faults, shorter ones, shorter prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec.structs import replace

from dyn_testkit.simulation.scenario import Plan, PlannedFault, RequestPlan
from dyn_testkit.users import Body

T = TypeVar("T")

#: Plans that are tried at most.
TRIES = 400
#: So many requests, or faults, are few enough to try all pairs.
FEW = 4


def shrink(plan: Plan, fails: Callable[[Plan], bool], tries: int = TRIES) -> Plan:
    """A plan that `fails`, too, and from which nothing can be taken that is taken here; or the best of `tries`.

    `fails` should hold for the same kind of failure only, or the search slips to another one.
    """
    left = tries
    improved = True
    while improved:
        improved = False
        for candidate in _smaller(plan):
            if left == 0:
                return plan
            left -= 1
            if fails(candidate):
                plan, improved = candidate, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Simpler plans, the boldest steps first."""
    yield from (replace(plan, faults=some) for some in _without(plan.faults))
    yield from (replace(plan, requests=some) for some in _without(plan.requests) if some)
    if len(plan.requests) <= FEW and len(plan.faults) <= FEW:
        for elsewhere in _elsewhere(plan):
            yield from (replace(elsewhere, requests=some) for some in _without(plan.requests) if some)
    alike = tuple(replace(plan.workers[0], role=worker.role) for worker in plan.workers)
    if alike != plan.workers:
        yield replace(plan, workers=alike)
    last = plan.workers[-1].role
    spare = any(worker.role == last for worker in plan.workers[:-1])
    if spare and not any(fault.worker == len(plan.workers) - 1 for fault in plan.faults):
        yield replace(plan, workers=plan.workers[:-1])
    if plan.fragment or plan.latency:
        yield replace(plan, fragment=0, latency=0.0)
    if plan.eos_rate:
        yield replace(plan, eos_rate=0.0)
    for number, request in enumerate(plan.requests):
        yield from (replace(plan, requests=_put(plan.requests, number, other)) for other in _simpler(request))
    for number, fault in enumerate(plan.faults):
        yield from (replace(plan, faults=_put(plan.faults, number, other)) for other in _milder(fault))


def _elsewhere(plan: Plan) -> Iterator[Plan]:
    """One fault of another worker: which one gets a request follows from the requests before it."""
    for number, fault in enumerate(plan.faults):
        for worker in range(len(plan.workers)):
            if worker != fault.worker:
                yield replace(plan, faults=_put(plan.faults, number, replace(fault, worker=worker)))


def _without(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """The items without one half, a quarter ... one of them."""
    size = len(items) // 2 or len(items)
    while size:
        for start in range(0, len(items), size):
            yield (*items[:start], *items[start + size :])
        size //= 2


def _put(items: Sequence[T], at: int, item: T) -> tuple[T, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _simpler(request: RequestPlan) -> Iterator[RequestPlan]:
    """Earlier, with a shorter prompt (its first two ids tell it from others), fewer wishes, fewer tokens."""
    body = request.body
    if request.at:
        yield replace(request, at=0.0)
    if len(body["input_ids"]) > 2:
        yield replace(request, body={**body, "input_ids": body["input_ids"][:2]})
    for name in body:
        if name not in ("input_ids", "sampling_params", "rid", "stream"):
            yield replace(request, body=_less(body, name))
    sampling = body["sampling_params"]
    for name in sampling:
        if name != "max_new_tokens":
            yield replace(request, body={**body, "sampling_params": _less(sampling, name)})
    tokens = sampling["max_new_tokens"]
    for fewer in (tokens // 2, tokens - 1):
        if 0 < fewer < tokens:
            yield replace(request, body={**body, "sampling_params": {**sampling, "max_new_tokens": fewer}})


def _less(fields: Body, name: str) -> Body:
    return {key: value for key, value in fields.items() if key != name}


def _milder(fault: PlannedFault) -> Iterator[PlannedFault]:
    """Earlier and shorter."""
    for at in (0.0, round(fault.at / 2, 1)):
        if at < fault.at:
            yield replace(fault, at=at)
    for duration in (1.0, round(fault.duration / 2, 1)):
        if 1.0 <= duration < fault.duration:
            yield replace(fault, duration=duration)
