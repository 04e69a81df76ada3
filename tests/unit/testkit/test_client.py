"""The test client itself."""

from __future__ import annotations

from typing import Any

import pytest
import trio.testing

from dyn_testkit import client, faults
from dyn_testkit.engine import Model
from dyn_testkit.faults import FaultPlan, at_token
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions

MODEL = Model(context_length=500)
BODY = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}


async def stream(plan: FaultPlan | None = None) -> client.Response:
    network = SimNetwork()
    options = WorkerOptions(model=MODEL, dialect="incremental", tick=0.01)
    async with MockWorker.serve(network, "worker", 1, options, plan) as worker:
        return await client.fetch(network, worker.url, "/generate", BODY)


async def test_its_work_is_linear(autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of many events is put together once, not once an event."""
    copied = 0

    class Counted(client.Response):
        def __setattr__(self, name: str, value: Any) -> None:
            nonlocal copied
            if isinstance(value, bytes):
                copied += len(value)
            super().__setattr__(name, value)

    monkeypatch.setattr(client, "Response", Counted)
    response = await stream()
    assert response.complete
    assert len(response.parts) > 400
    assert copied <= len(response.wire) + len(response.body) + len(response.reason)


async def test_what_came_before_a_cut_is_there(autojump_clock: trio.testing.MockClock) -> None:
    response = await stream(FaultPlan.in_order([(at_token(3), faults.RESET)]))
    assert (response.complete, response.broken, len(response.values())) == (False, "reset", 3)
    assert response.body == b"".join(response.parts)
    assert response.wire.startswith(b"HTTP/1.1 200 OK\r\n")
    assert all(part in response.wire for part in response.parts)
