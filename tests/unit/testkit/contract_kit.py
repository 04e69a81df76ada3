"""What the tests of the contract test share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mock_worker_kit import options

from dyn_testkit.contract import ContractBroken, Report, check_worker
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions


def setup(**more: Any) -> WorkerOptions:
    """Everything that the mock is able to do, slow enough to be disturbed."""
    return options(**({"tick": 0.01, "routed_experts": True} | more))


def serving(how: WorkerOptions, kind: type[MockWorker] = MockWorker) -> Callable[[], Any]:
    return lambda: kind.serve(SimNetwork(), "worker", 30000, how)


async def broken(*names: str, kind: type[MockWorker] = MockWorker, how: Any = None, **expected: Any) -> dict[str, str]:
    """Which of these checks a worker breaks, and how."""
    try:
        await check_worker(serving(how or setup(), kind), only=names or None, **expected)
    except ContractBroken as exc:
        return exc.report.broken
    return {}


async def report_of(factory: Callable[[], Any], **expected: Any) -> Report:
    try:
        return await check_worker(factory, **expected)
    except ContractBroken as exc:
        return exc.report
