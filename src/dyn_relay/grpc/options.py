"""How connections to a server are made and kept."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from dyn_relay.grpc.messages import MAX_MESSAGE
from dyn_relay.net import Network


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """When a silent connection with streams on it is asked whether it lives. All in seconds.

    A server of grpc-core or grpc-go forgives two pings that come within 300 s of the one before and have no HEADERS or
    DATA of its own in between, then closes with `too_many_pings` (GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA,
    GRPC_ARG_HTTP2_MAX_PING_STRIKES); without streams it wants 7200 s. So a silence is asked after once, soon, and
    then rarely, and a connection without streams not at all.
    """

    #: Without a byte from the server, until the first ping.
    silence: float = 30.0
    #: Until the answer; then the connection is given up. A server that answers other things meanwhile lives.
    timeout: float = 20.0
    #: Between two pings, if no HEADERS or DATA came after the first one's answer.
    interval: float = 310.0


@dataclass(frozen=True, slots=True)
class Options:
    """How connections to one server are made and kept."""

    network: Network
    host: str
    port: int
    tls: ssl.SSLContext | None = None
    connect_timeout: float = 5.0
    streams_per_connection: int = 8
    idle_timeout: float = 60.0
    max_message: int = MAX_MESSAGE
    keepalive: KeepAlive = KeepAlive()

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
