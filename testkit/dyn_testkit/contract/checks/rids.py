"""Names of requests."""

from __future__ import annotations

from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import check, equal, expect


@check("§2, §4.4")
async def rid_is_echoed(worker: Subject) -> None:
    """`meta_info.id` is the request's `rid`, in a unary answer and in every event."""
    rid = worker.rid()
    equal("id", (await worker.unary(worker.body(2, rid=rid)))["meta_info"]["id"], rid)
    rid = worker.rid()
    for event in await worker.events(worker.body(4, rid=rid)):
        equal("id of an event", event["meta_info"]["id"], rid)


@check("§2")
async def rid_is_made(worker: Subject) -> None:
    """A request without `rid` gets one, and each its own."""
    first = (await worker.unary(worker.body(1)))["meta_info"]["id"]
    second = (await worker.unary(worker.body(1)))["meta_info"]["id"]
    expect(isinstance(first, str) and first != "", f"id is {first!r}")
    expect(first != second, f"two requests have one id, {first!r}")


@check("§2, §10.8")
async def rid_is_free_again(worker: Subject) -> None:
    """After a unary answer its `rid` may be used again."""
    rid = worker.rid()
    for _ in range(2):
        equal("id", (await worker.unary(worker.body(1, rid=rid)))["meta_info"]["id"], rid)


@check("§1.5, tokenizer_manager.py:3833")
async def live_rid_is_refused(worker: Subject) -> None:
    """A `rid` that is live is refused to a unary request with 400; the one that has it goes on."""
    rid = worker.rid()
    async with worker.live(rid, 0.5) as live:
        refused = (await worker.ask("/generate", worker.body(1, rid=rid))).response
        equal("status", refused.status, 400)
        equal("body", refused.json(), {"error": {"message": f"Duplicate request ID detected: {rid}"}})
        last = (await live.rest())[-1]["meta_info"]
    equal("finish_reason of the first", last["finish_reason"], {"type": "length", "length": live.count})


@check("§1.5, §4.2")
async def live_rid_is_refused_to_a_stream(worker: Subject) -> None:
    """A `rid` that is live is refused to a stream with 200 and one error event.

    What becomes of the one that has it is not looked at: SGLang 0.5.23 aborts it 2 s later, because the end of any
    stream makes it abort what then has the stream's rid.
    """
    rid = worker.rid()
    async with worker.live(rid):
        exchange = await worker.ask("/generate", worker.body(1, rid=rid, stream=True))
    (value,) = worker.values_of(exchange)
    wanted = {"type": "invalid_request_error", "code": 400, "retryable": False}
    equal("the error event", value["error"], {"message": f"Duplicate request ID detected: {rid}", **wanted})


@check("§2, io_struct.py:763")
async def rids_of_a_batch(worker: Subject) -> None:
    """A list of `rid` names the prompts of a batch in order; a single one becomes `rid_0`, `rid_1`."""
    prompts = [list(worker.prompt)] * 2
    named = [worker.rid(), worker.rid()]
    one = worker.rid()
    for rid, wanted in ((named, named), (one, [f"{one}_0", f"{one}_1"])):
        values = await worker.unary(worker.body(2, input_ids=prompts, rid=rid))
        equal("ids", [value["meta_info"]["id"] for value in values], wanted)
