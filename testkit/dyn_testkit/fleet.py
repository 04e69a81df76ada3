"""A fleet of mock workers that grows on demand, and a prefill/decode pair."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import trio

from dyn_relay.net import Network
from dyn_testkit.background import background
from dyn_testkit.client import Response
from dyn_testkit.faults import FaultPlan
from dyn_testkit.worker import MockWorker, WorkerOptions


class Fleet:
    """Mock workers on one network. Made by `open_fleet`; call it for more workers."""

    def __init__(self, network: Network, host: str, port: int, nursery: trio.Nursery) -> None:
        #: All of them, in the order of starting.
        self.workers: list[MockWorker] = []
        self._network = network
        self._host = host
        self._port = port
        self._nursery = nursery
        self._followers: list[Callable[[MockWorker], object]] = []

    async def __call__(
        self,
        count: int = 1,
        *,
        options: WorkerOptions | Sequence[WorkerOptions | None] | None = None,
        faults: Sequence[FaultPlan | None] | None = None,
        port: int | None = None,
    ) -> list[MockWorker]:
        """Start `count` workers; return them once they listen.

        `options`: of all, or worker by worker; `faults`: worker by worker; `port`: instead of the fleet's own.
        Raises `ValueError` if there is not one of these a worker, `TypeError` for what is no plan, `OSError` for a port
        that is in use.
        """
        each = list(options) if isinstance(options, Sequence) else [options] * count
        if isinstance(faults, FaultPlan):
            raise TypeError("faults: a list with a FaultPlan or None for each worker, not one FaultPlan")
        plans = [None] * count if faults is None else list(faults)
        for name, given in (("options", each), ("faults", plans)):
            if len(given) != count:
                raise ValueError(f"{name}: {len(given)} for {count} workers; give one a worker, None for nothing")
        for plan in plans:
            if not isinstance(plan, FaultPlan | None):
                raise TypeError(f"faults: a FaultPlan or None for each worker, not {plan!r}; see FaultPlan.of")
        return [await self._start(option, plan, port) for option, plan in zip(each, plans, strict=True)]

    async def _start(self, options: WorkerOptions | None, faults: FaultPlan | None, port: int | None) -> MockWorker:
        host = self._host.format(len(self.workers) + 1)
        worker = MockWorker(self._network, host, self._port if port is None else port, options, faults)
        try:
            await self._nursery.start(worker.run)
        except OSError as exc:
            address = f"{worker.host}:{worker.port}"
            raise OSError(exc.errno, f"no worker can listen on {address}: {exc.strerror or exc}") from exc
        self.workers.append(worker)
        for follower in self._followers:
            follower(worker)
        return worker

    def follow(self, act: Callable[[MockWorker], object]) -> None:
        """Call `act` with each worker that is there, and with each that comes."""
        self._followers.append(act)
        for worker in self.workers:
            act(worker)

    @property
    def unfired(self) -> list[str]:
        """The faults that have never happened, with their workers."""
        return [
            f"{worker.host}:{worker.port}: {fault} never happened ({len(worker.generates)} requests came)"
            for worker in self.workers
            for fault in worker.faults.missing
        ]


@asynccontextmanager
async def open_fleet(network: Network, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Fleet]:
    """A fleet that runs as long as the block does; `{}` in `host` is the worker's number, from 1."""
    async with background() as nursery:
        yield Fleet(network, host, port, nursery)


@dataclass(slots=True)
class Pair:
    """A prefill and a decode worker. Made by `open_pair`."""

    prefill: MockWorker
    decode: MockWorker
    _rooms: Iterator[int] = field(default_factory=lambda: count(1))

    def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body that both workers get for a client's, which may say where and in which room they meet."""
        meeting = {"bootstrap_host": self.prefill.host, "bootstrap_port": self.prefill.bootstrap_port}
        room = {} if "bootstrap_room" in body else {"bootstrap_room": next(self._rooms)}
        return meeting | room | dict(body)

    async def ask(
        self, body: Mapping[str, Any], prefill: Mapping[str, Any] | None = None, decode: Mapping[str, Any] | None = None
    ) -> tuple[Response, Response]:
        """Prefill's and decode's answers to a client's one request; `prefill`, `decode`: fields of one leg alone."""
        shared, answers = self.body(body), [Response(), Response()]

        async def ask(index: int, worker: MockWorker, own: Mapping[str, Any] | None) -> None:
            answers[index] = await worker.ask(shared | dict(own or {}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0, self.prefill, prefill)
            nursery.start_soon(ask, 1, self.decode, decode)
        return answers[0], answers[1]


@asynccontextmanager
async def open_pair(
    network: Network,
    host: str = "127.0.0.1",
    *,
    options: WorkerOptions | None = None,
    decode_options: WorkerOptions | None = None,
    faults: tuple[FaultPlan | None, FaultPlan | None] = (None, None),
) -> AsyncIterator[Pair]:
    """A prefill/decode pair that runs as long as the block does; `{}` in `host` is the role. Raises `OSError`.

    `options` are of both, unless decode has its own; roles and bootstrap port are set. `faults`: of prefill, of decode.
    """
    prefill_setup = replace(options or WorkerOptions(), disaggregation="prefill", bootstrap_port=0)
    decode_setup = replace(decode_options or options or WorkerOptions(), disaggregation="decode")
    prefill = MockWorker(network, host.format("prefill"), 0, prefill_setup, faults[0])
    decode = MockWorker(network, host.format("decode"), 0, decode_setup, faults[1])
    async with background() as nursery:
        for worker in (prefill, decode):
            await nursery.start(worker.run)
        yield Pair(prefill, decode)
