"""The gRPC side of a worker: SGLang 0.5.23's native service (`--grpc-port`), beside HTTP, with the same engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dyn_relay.net import Connection
from dyn_testkit.faults import Seen
from dyn_testkit.grpc import Call, Wire, dispatch
from dyn_testkit.worker.grpc.channels import Channels
from dyn_testkit.worker.grpc.generate import plant
from dyn_testkit.worker.grpc.service import routes

if TYPE_CHECKING:
    from dyn_testkit.worker.core import MockWorker

__all__ = ["Channels", "serve"]


async def serve(worker: MockWorker, connection: Connection, index: int) -> None:
    """Serve a connection until it ends. Raises `AnswerCut`, `dyn_relay.net.ConnectionBroken`."""
    wire = Wire(connection, partial(dispatch, routes(worker, index)), wall=worker.renderer.wall)
    fault = worker.faults.for_connection(index)
    if fault is not None:
        await plant(worker, fault, Seen(index, grpc=True), Call(wire, 0, "", ())).at(fault.where.spot)
    await wire.run()
