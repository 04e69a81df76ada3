"""Routed experts of mixture-of-experts models."""

from __future__ import annotations

import base64
from typing import Any

from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import Inapplicable, check, equal, expect


def _body(worker: Subject, count: int, **more: Any) -> dict[str, Any]:
    if not worker.facts.experts:
        raise Inapplicable("the worker does not return routed experts (or give experts=True)")
    return worker.body(count, return_routed_experts=True, **more)


async def _rows(worker: Subject, count: int, *, stream: bool = False, **more: Any) -> bytes:
    value = await worker.answer(_body(worker, count, **more), stream=stream)
    expect("routed_experts" in value["meta_info"], "meta_info lacks routed_experts")
    return base64.b64decode(value["meta_info"]["routed_experts"], validate=True)


async def _width(worker: Subject) -> int:
    """Bytes a row: what two more tokens add, halved."""
    shorter, longer = await _rows(worker, 3), await _rows(worker, 5)
    width = (len(longer) - len(shorter)) // 2
    expect(width > 0 and width % 4 == 0, f"two tokens more add {len(longer) - len(shorter)} bytes: no rows of int32")
    return width


@check("§4.9, batch_result_processor.py:136")
async def expert_rows(worker: Subject) -> None:
    """`routed_experts` is base64 of int32 rows, one a token of prompt and output but the last."""
    width = await _width(worker)
    for stream in (False, True):
        rows = await _rows(worker, 5, stream=stream)
        equal(f"bytes of rows of {width}", len(rows), width * (len(worker.prompt) + 5 - 1))


@check("§4.9, io_struct.py:265")
async def expert_start(worker: Subject) -> None:
    """`routed_experts_start_len` leaves out that many rows at the beginning."""
    width = await _width(worker)
    whole = await _rows(worker, 4)
    equal("rows from 2 on", await _rows(worker, 4, routed_experts_start_len=2), whole[2 * width :])


@check("§4.9, §4.3")
async def experts_come_last(worker: Subject) -> None:
    """`routed_experts` is in the finished event only, and nowhere for those who do not ask."""
    *running, _ = await worker.events(_body(worker, 4))
    early = sum("routed_experts" in event["meta_info"] for event in running)
    equal("events with rows before the finish", early, 0)
    expect("routed_experts" not in (await worker.unary(worker.body(2)))["meta_info"], "rows that nobody asked for")
