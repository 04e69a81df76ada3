"""What an administrator does to a worker. Each check undoes what it has done."""

from __future__ import annotations

from typing import Any

import trio

from dyn_testkit.client import Response
from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import Inapplicable, check, equal, expect

#: s that a request of a paused worker is watched not to be answered.
_WATCHED = 0.3


async def _control(worker: Subject, path: str, body: dict[str, Any]) -> Response:
    response = (await worker.ask(path, body)).response
    if response.status in (401, 403):
        raise Inapplicable(f"{path} wants another key")
    equal(f"status of {path}", response.status, 200)
    return response


@check("§1.1, §1.5, http_server.py:1831")
async def pause_and_continue(worker: Subject) -> None:
    """A paused worker is not ready, and requests wait until it continues."""
    said = await _control(worker, "/pause_generation", {})
    try:
        equal("the answer", said.json(), {"message": "Generation paused successfully.", "status": "ok"})
        equal("status of /ready", (await worker.ask("/ready")).response.status, 503)
        async with worker.live(worker.rid(), stream=False, count=2) as waiting:
            early = await waiting.ended(_WATCHED)
            expect(not early, "a request is answered during a pause")
            said = await _control(worker, "/continue_generation", {})
            equal("the answer", said.json(), {"message": "Generation continued successfully.", "status": "ok"})
            value = worker.value_of(await worker.read(waiting.exchange))
    finally:
        last = worker.last
        with trio.CancelScope(shield=True):
            await worker.ask("/continue_generation", {})
        worker.last = last
    equal("output_ids after it", value["output_ids"], await worker.ids(worker.body(2)))
    equal("status of /ready", (await worker.ask("/ready")).response.status, 200)


@check("§1.1, http_server.py:1025")
async def flush_cache(worker: Subject) -> None:
    """`POST /flush_cache` of an idle worker is 200 and a text; afterwards nothing is cached."""
    await worker.ids(worker.body(1))
    response = await _control(worker, "/flush_cache?timeout=5", {})
    expect(response.body.startswith(b"Cache flushed."), "the text is another one")
    equal("cached_tokens", (await worker.unary(worker.body(1)))["meta_info"]["cached_tokens"], 0)


@check("§1.1, http_server.py:1527")
async def weight_version_update(worker: Subject) -> None:
    """`POST /update_weight_version` changes the version that `/model_info` and answers tell."""
    before = (await worker.ask("/model_info")).response.json()["weight_version"]
    try:
        await _update(worker, f"{before}-2")
    finally:
        await _update(worker, before)


async def _update(worker: Subject, version: str) -> None:
    said = await _control(worker, "/update_weight_version", {"new_version": version, "abort_all_requests": False})
    wanted = {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
    equal("the answer", said.json(), wanted)
    told = (await worker.ask("/model_info")).response.json()["weight_version"]
    equal("weight_version of /model_info", told, version)
    meta = (await worker.unary(worker.body(2)))["meta_info"]
    equal("weight_version of an answer", meta["weight_version"], version)
