"""What a client sends that gRPC has no way to say must never look like an engine that fails."""

from __future__ import annotations

from typing import Any

import pytest

from dyn_testkit.engine import Model
from dyn_testkit.oracle import Oracle
from tests.direct.kit import direct
from tests.direct.test_gateway import IDS, world
from tests.direct.test_proxy import body
from tests.relay.harness import judged


@pytest.mark.parametrize("value", ["café".encode(), b"a\tb"], ids=str)
async def test_a_request_id_that_no_metadata_can_be(autojump_clock, value):
    """It would else fail before each engine, and have each of them suspected."""
    async with direct() as w:
        answer = await w.ask(body(), headers={"x-request-id": value})
        assert judged(answer, body(), Oracle(Model())) == []
        await w.quiet()
        assert len(w.rows[0]["attempts"]) == 1
        assert all(worker.state == "ready" for worker in w.app.fleet.workers)


@pytest.mark.parametrize("depth", [31, 150, 400])
async def test_a_payload_that_is_nested_deeper_than_protobuf_is_read(autojump_clock, depth):
    deep: Any = 0
    for _ in range(depth):
        deep = {"a": deep}
    async with world() as w:
        answer = await w.ask("/generate", {**IDS, "kv_hints": {"actions": [{"payload": deep}]}})
        assert (answer.status, b"nested" in answer.body) == (400, True)
