"""The independent peer: a real grpcio server with handlers that do what the request's text says.

It runs in grpcio's own threads, on 127.0.0.1, and knows the methods from our table only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.methods import SERVICE, Method


@dataclass
class Peer:
    """A running server, and what it has seen."""

    server: grpc.Server
    port: int
    #: Metadata of each call, in order.
    seen: list[dict[str, str | bytes]] = field(default_factory=list)
    #: Seconds that each call had left when it came; None without a deadline.
    left: list[float | None] = field(default_factory=list)
    #: Calls that were ended by the client before their end.
    cancelled: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    #: Messages sent by `flood` so far.
    sent: int = 0
    #: Released by a test to let `wait` go on.
    go_on: threading.Event = field(default_factory=threading.Event)

    def note(self, context: grpc.ServicerContext) -> None:
        self.seen.append({item.key: item.value for item in context.invocation_metadata()})
        self.left.append(context.time_remaining())
        context.add_callback(lambda: None if context.code() is not None else self.cancelled.release())


def _generate(peer: Peer, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
    """`rid` is the order: `count N`, `fail CODE TEXT`, `trailers`, `hang`, `step N`, `flood SIZE`."""
    peer.note(context)
    order, _, argument = request.rid.partition(" ")
    if order == "count":
        for number in range(int(argument)):
            yield pb.GenerateResponse(output_ids=[number])
    elif order == "fail":
        code, _, text = argument.partition(" ")
        yield pb.GenerateResponse(output_ids=[7])
        context.abort(grpc.StatusCode[code], text)
    elif order == "trailers":
        context.send_initial_metadata((("ascii", "plain"), ("raw-bin", b"\0\xff,")))
        yield pb.GenerateResponse(output_ids=[1])
        context.set_trailing_metadata((("last", "words"), ("end-bin", b"\xfe")))
    elif order == "hang":
        yield pb.GenerateResponse(output_ids=[1])
        peer.go_on.wait(60)
        yield pb.GenerateResponse(output_ids=[2])
    elif order == "step":
        for number in range(int(argument)):
            yield pb.GenerateResponse(output_ids=[number])
            peer.go_on.wait(60)
            peer.go_on.clear()
    elif order == "flood":
        size = int(argument)
        while context.is_active():
            peer.sent += 1
            yield pb.GenerateResponse(meta_info={"filler": "x" * size})
    else:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no order {order}")


def _text_generate(peer: Peer, request: pb.TextGenerateRequest, context: Any) -> Iterator[pb.TextGenerateResponse]:
    peer.note(context)
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "no ünits: 100% of \n them")
    yield pb.TextGenerateResponse()


def _tokenize(peer: Peer, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
    peer.note(context)
    return pb.TokenizeResponse(tokens=[len(request.text)], input_text=request.text)


def _handler(peer: Peer, method: Method[Any, Any], behaviour: Any) -> grpc.RpcMethodHandler:
    make = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
    return make(
        lambda request, context: behaviour(peer, request, context),
        request_deserializer=method.request.FromString,
        response_serializer=method.response.SerializeToString,
    )


BEHAVIOURS = {methods.GENERATE: _generate, methods.TEXT_GENERATE: _text_generate, methods.TOKENIZE: _tokenize}


@contextmanager
def serving(*options: tuple[str, Any], credentials: grpc.ServerCredentials | None = None) -> Iterator[Peer]:
    """A server for as long as the block lasts; `options` are grpcio's channel arguments."""
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(64), options=[*options, *limits])
    secure = credentials is not None
    port = server.add_secure_port("127.0.0.1:0", credentials) if secure else server.add_insecure_port("127.0.0.1:0")
    peer = Peer(server, port)
    handlers = {m.path.rpartition("/")[2]: _handler(peer, m, behaviour) for m, behaviour in BEHAVIOURS.items()}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    server.start()
    try:
        yield peer
    finally:
        peer.go_on.set()
        server.stop(0).wait()
