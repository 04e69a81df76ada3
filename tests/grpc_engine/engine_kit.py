"""What the tests of the gRPC engine share: its server in memory, workers with a gRPC side, requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_testkit.background import background
from dyn_testkit.engine import Model
from dyn_testkit.faults import FaultPlan
from dyn_testkit.grpc import Call, Limits, Route, Wire, dispatch
from dyn_testkit.grpc.client import Answer, Client, ask, open_client
from dyn_testkit.simnet import Link, SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions

URL = "grpc://server:1"
MODEL = Model(vocab_size=300, context_length=2000)
PROMPT = [7, 8, 9]
Handler = Callable[[Call, pb.GenerateRequest], Awaitable[None]]


class Server:
    """A server of `Generate` in memory, which keeps its wires."""

    def __init__(self, handler: Handler, limits: Limits | None = None, link: Link | None = None) -> None:
        self.network = SimNetwork(link=link or Link())
        self.wires: list[Wire] = []
        self._routes = {methods.GENERATE.path: Route(pb.GenerateRequest, handler)}
        self._limits = limits

    async def run(self, task_status: Any) -> None:
        listener = await self.network.listen("server", 1)
        task_status.started()
        async with background() as nursery:
            while True:
                wire = Wire(await listener.accept(), partial(dispatch, self._routes), self._limits)
                self.wires.append(wire)
                nursery.start_soon(wire.run)

    async def ask(self, request: Any, metadata: Any = ()) -> Answer[pb.GenerateResponse]:
        return await ask(self.network, URL, methods.GENERATE, request, metadata)


@asynccontextmanager
async def serving(handler: Handler, **more: Any) -> AsyncIterator[Server]:
    server = Server(handler, **more)
    async with background() as nursery:
        await nursery.start(server.run)
        yield server


@asynccontextmanager
async def talking(handler: Handler, window: int | None = None, **more: Any) -> AsyncIterator[tuple[Server, Client]]:
    """A server, and one connection to it."""
    async with serving(handler, **more) as server, open_client(server.network, URL, window) as client:
        yield server, client


@asynccontextmanager
async def engine(plan: FaultPlan | None = None, **more: Any) -> AsyncIterator[MockWorker]:
    """A worker with both sides, in memory."""
    options = WorkerOptions(**{"model": MODEL, "grpc_port": 2} | more)
    async with MockWorker.serve(SimNetwork(), "worker", 1, options, plan) as worker:
        yield worker


def wanted(tokens: int = 5, **more: Any) -> pb.GenerateRequest:
    """A greedy request with ids."""
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True} | more.pop("sampling", {})
    given = {"input_ids": PROMPT, "stream": True} | more
    return pb.GenerateRequest(sampling_params=pb.SamplingParams(**params), **given)


async def generate(worker: MockWorker, request: Any, metadata: Any = ()) -> Answer[Any]:
    """One call on a connection of its own."""
    method = methods.TEXT_GENERATE if isinstance(request, pb.TextGenerateRequest) else methods.GENERATE
    return await ask(worker.network, worker.grpc_url, method, request, metadata)
