"""gRPC on the server's side, on trio over h2. It shares no parser with the proxy's client: no error is made twice."""

from dyn_testkit.grpc.call import Call, CallGone
from dyn_testkit.grpc.framing import MAX_MESSAGE, Status, frame
from dyn_testkit.grpc.routes import Handler, Route, Routes, dispatch, unary
from dyn_testkit.grpc.wire import Limits, Wire

__all__ = [
    "MAX_MESSAGE",
    "Call",
    "CallGone",
    "Handler",
    "Limits",
    "Route",
    "Routes",
    "Status",
    "Wire",
    "dispatch",
    "frame",
    "unary",
]
