"""Aborts: by name, by prefix, of everything, and by going away."""

from __future__ import annotations

from typing import Any

import trio

from dyn_testkit.contract.subject import Live, Subject
from dyn_testkit.contract.table import Broken, Inapplicable, Silent, check, equal, expect

_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
#: Between two looks at something that happens by itself.
_LOOK = 0.05
#: s between two looks of SGLang at the client of a unary request.
_POLLED = 4.0


def _require_room(worker: Subject, count: int) -> None:
    """Raises `Inapplicable` if so many requests cannot run at a time."""
    most = worker.facts.says("max_running_requests")
    if isinstance(most, int) and most < count:
        raise Inapplicable(f"{count} requests must run at a time; max_running_requests is {most}")


async def _abort(worker: Subject, **body: Any) -> None:
    response = (await worker.ask("/abort_request", body)).response
    equal("status of /abort_request", response.status, 200)


def _finish(events: list[dict[str, Any]]) -> Any:
    return events[-1]["meta_info"]["finish_reason"]


@check("§5, scheduler.py:5797")
async def abort_a_stream(worker: Subject) -> None:
    """An aborted stream ends with a finish of type `abort`, without status code, and `[DONE]`; its tokens stay."""
    rid = worker.rid()
    async with worker.live(rid) as live:
        await _abort(worker, rid=rid)
        events = await live.rest()
    equal("finish_reason", _finish(events), _ABORTED)
    value = worker.folded(events)
    count = value["meta_info"]["completion_tokens"]
    expect(0 < count < live.count, f"{count} tokens of {live.count}")
    equal("its tokens", value["output_ids"], await worker.ids(worker.body(count)))
    equal("the end of weight_versions", value["meta_info"]["weight_versions"][-1]["end"], count)


@check("§5, scheduler.py:5797")
async def abort_a_unary_request(worker: Subject) -> None:
    """An aborted unary request is 200 with a finish of type `abort` and its tokens so far."""
    rid = worker.rid()
    async with worker.live(rid, stream=False) as live:
        # Only a live rid can be aborted, and nothing tells when it has become live: try until it ends.
        began = trio.current_time()
        while not await live.ended(_LOOK):
            await _abort(worker, rid=rid)
            if trio.current_time() - began > worker.patience:
                raise Silent(f"no whole answer within {worker.patience:g} s")
        worker.last = live.exchange
        value = worker.value_of(live.exchange)
    equal("finish_reason", value["meta_info"]["finish_reason"], _ABORTED)
    equal("completion_tokens", value["meta_info"]["completion_tokens"], len(value["output_ids"]))


@check("§5, tokenizer_manager.py:2241")
async def abort_of_nobody(worker: Subject) -> None:
    """An abort of an empty rid, or of one that is not live, does nothing."""
    rid = worker.rid()
    async with worker.live(rid, 0.5) as live:
        await _abort(worker, rid=worker.rid())
        await _abort(worker, rid="")
        await _abort(worker)
        await _spared(live)


@check("§5, tokenizer_manager.py:2241")
async def abort_of_a_mere_prefix(worker: Subject) -> None:
    """A rid that is not live itself aborts nothing, even if live ones begin with it."""
    if worker.facts.says("tokenizer_worker_num", 1) != 1:
        raise Inapplicable("with several tokenizer workers every abort reaches the scheduler")
    name = worker.rid()
    async with worker.live(name + "1", 0.5) as live:
        await _abort(worker, rid=name)
        events = await live.rest()
    equal("finish_reason", _finish(events), {"type": "length", "length": live.count})


@check("§5, scheduler.py:5675")
async def abort_by_prefix(worker: Subject) -> None:
    """An abort of a live rid takes with it the live ones that begin with it, and no others."""
    _require_room(worker, 3)
    name = worker.rid()
    async with worker.live(name) as short, worker.live(name + "1") as longer, worker.live(worker.rid()) as other:
        await _abort(worker, rid=name)
        equal("finish_reason of the one named", _finish(await short.rest()), _ABORTED)
        wanted = _ABORTED if worker.facts.abort_by_prefix else {"type": "length", "length": longer.count}
        equal("finish_reason of the one that begins with it", _finish(await longer.rest()), wanted)
        await _spared(other)


@check("§5, scheduler.py:5675")
async def abort_of_the_longer_name(worker: Subject) -> None:
    """An abort of the longer of two names leaves the shorter one alone."""
    _require_room(worker, 2)
    name = worker.rid()
    async with worker.live(name, 0.5) as short, worker.live(name + "1") as longer:
        await _abort(worker, rid=name + "1")
        equal("finish_reason of the one named", _finish(await longer.rest()), _ABORTED)
        await _spared(short)


async def _spared(live: Live) -> None:
    equal("finish_reason of a bystander", _finish(await live.rest()), {"type": "length", "length": live.count})


@check("§5, io_struct.py:2285")
async def abort_all(worker: Subject) -> None:
    """`abort_all` ends every request."""
    _require_room(worker, 2)
    loads = (await worker.ask("/v1/loads")).response
    if loads.status == 200 and any(load["num_running_reqs"] for load in loads.json()["loads"]):
        raise Inapplicable("requests that are not ours are running")
    async with worker.live(worker.rid()) as one, worker.live(worker.rid()) as other:
        await _abort(worker, abort_all=True)
        for live in (one, other):
            equal("finish_reason", _finish(await live.rest()), _ABORTED)


@check("§4.2, tokenizer_manager.py:3850")
async def disconnect_aborts(worker: Subject) -> None:
    """A client that goes away ends its stream: the rid is soon free again."""
    rid = worker.rid()
    began = trio.current_time()
    async with worker.live(rid) as live:
        live.connection.close()
    await _freed(worker, rid, began, live.count * worker.facts.pace / 2)


@check("§5, tokenizer_manager.py:1954")
async def disconnect_aborts_a_unary_request(worker: Subject) -> None:
    """A client that goes away ends its unary request: SGLang looks for it every 4 s."""
    rid = worker.rid()
    share = max(1.0, 3 * _POLLED / worker.live_seconds)
    natural = worker.live_tokens(share) * worker.facts.pace
    if natural < 2 * _POLLED:
        raise Inapplicable(f"its longest generation takes {natural:.3g} s; a client's leaving is seen within 4 s")
    began = trio.current_time()
    async with worker.live(rid, share, stream=False) as live:
        # Its name is refused as soon as it is live.
        await trio.sleep(_LOOK)
        if (await worker.ask("/generate", worker.body(1, rid=rid))).response.status != 400:
            raise Inapplicable(f"it did not yet run after {_LOOK:g} s")
        live.connection.close()
    await _freed(worker, rid, began, natural * 3 / 4)


async def _freed(worker: Subject, rid: str, began: float, seconds: float) -> None:
    """Another request may have the name, so many seconds after `began`: the one that had it has ended."""
    while (status := (await worker.ask("/generate", worker.body(1, rid=rid))).response.status) == 400:
        if trio.current_time() - began > seconds:
            raise Broken(f"{seconds:.2g} s after its client had gone the generation still ran")
        await trio.sleep(_LOOK)
    equal("status", status, 200)
