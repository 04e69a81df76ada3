"""The sidecar's options: flags, and their twins in the environment."""

# ruff: noqa: RUF009 - `option` makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal, cast

from dyn_relay.config import ConfigError, LogLevel, Option, option, options_of
from dyn_relay.config.checks import are_urls, is_name_and_port, is_path
from dyn_relay.http11.origin import Origin

#: The switch of Dynamo's name.
GENERATE_ENV = "DYN_SGLANG_ENABLE_GENERATE"

_ENGINE, _PLACE, _RELAYS, _LIMITS, _OBSERVE = "Engine", "Address", "Proxies", "Timeouts and limits", "Observation"
#: Addresses that mean all of a machine's: nobody can dial them.
_EVERYWHERE = ("0.0.0.0", "::")


def _are_http(value: object) -> None:
    """URLs of HTTP servers."""
    urls = cast("tuple[str, ...]", value or ())
    are_urls(urls)
    for url in urls:
        if Origin.parse(url).grpc:
            raise ValueError(f"{url!r}: an HTTP server is meant, not a gRPC one")


def _is_http(value: object) -> None:
    _are_http(value and (value,))


def _is_here(host: str) -> bool:
    """Does it name the machine of whoever dials it?"""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one sidecar is told. Raises `ConfigError`."""

    engine: str | None = option(_ENGINE, None, "The engine's HTTP URL.", verify=_is_http, metavar="URL")
    engine_grpc: str | None = option(
        _ENGINE,
        None,
        "The engine's gRPC server. Alone: all that it can do is shown over HTTP. Beside --engine: it generates and "
        "aborts, the rest goes over HTTP, and so does what gRPC cannot carry.",
        metavar="HOST:PORT",
    )
    engine_api_key: str | None = option(_ENGINE, None, "Sent to the engine when the sidecar asks it.", secret=True)
    enable_generate: bool = option(
        _ENGINE, True, "Serve native /generate. Without it that path is a 404.", env=GENERATE_ENV
    )
    health_check_endpoint: str = option(_ENGINE, "/health", "Path that says how the engine is.", verify=is_path)
    health_check_interval_secs: float = option(_ENGINE, 10.0, "Pause between two looks at it.", minimum=0.001)

    listen: str = option(
        _PLACE, "127.0.0.1:0", "Where the engine is shown; port 0 lets the system choose.", metavar="HOST:PORT"
    )
    advertise: str | None = option(
        _PLACE, None, "URL under which proxies reach that; unset = as --listen.", verify=_is_http, metavar="URL"
    )

    relay: tuple[str, ...] = option(
        _RELAYS, (), "Proxies to register at; several, each behind its own flag.", verify=_are_http, metavar="URL"
    )
    relay_api_key: str | None = option(_RELAYS, None, "The proxies' admin key.", secret=True)
    worker_type: Literal["regular", "prefill", "decode"] | None = option(
        _RELAYS, None, "What the engine is registered for; unset = what it says itself."
    )
    lease_secs: float = option(
        _RELAYS, 10.0, "Proxies drop the engine when they have not heard of it for so long.", minimum=0.1, maximum=3600
    )

    shutdown_grace_period_secs: float = option(
        _LIMITS, 180.0, "After SIGTERM, how long live requests may go on.", minimum=0
    )
    connect_timeout_secs: float = option(_LIMITS, 5.0, "Time to connect to the engine, or to a proxy.", minimum=0.001)
    keep_alive_timeout_secs: float = option(
        _LIMITS, 90.0, "How long an idle connection of a proxy is kept open.", minimum=0
    )
    max_payload_size: int = option(
        _LIMITS, 536870912, "Longest request body, in bytes; a longer one gets 413.", minimum=1
    )

    requests_file: str | None = option(
        _OBSERVE,
        None,
        "Append one JSON line for each generation and abort that goes to the engine. Prompts are in it.",
        metavar="PATH",
    )
    log_level: LogLevel = option(_OBSERVE, "info", "The least that is logged.")
    log_json: bool = option(_OBSERVE, False, "Log JSON lines instead of text.")

    def __post_init__(self) -> None:
        for row in OPTIONS:
            row.check(getattr(self, row.name), f"{type(self).__name__}()")
        if self.engine is None and self.engine_grpc is None:
            raise ConfigError("engine: needed, the engine's URL, or engine_grpc, or both")
        _ = self.grpc  # as below: each raises for what it is made of
        host, _ = self.address
        if self.advertise is None and self.relay:
            if host in _EVERYWHERE:
                raise ConfigError(f"advertise: needed, since no proxy can dial {host}, where --listen is")
            far = [relay for relay in self.relay if not _is_here(Origin.parse(relay).host)]
            if _is_here(host) and far:
                raise ConfigError(f"advertise: needed, or another --listen: at {far[0]}, {host} is that machine itself")

    @property
    def origin(self) -> Origin:
        """Whom to ask what the engine is, and to send what it is asked."""
        if self.engine is not None:
            return Origin.parse(self.engine)
        assert self.grpc is not None
        return self.grpc

    @property
    def grpc(self) -> Origin | None:
        """The engine's gRPC server. Raises `ConfigError`."""
        if self.engine_grpc is None:
            return None
        url = self.engine_grpc if "://" in self.engine_grpc else f"grpc://{self.engine_grpc}"
        try:
            origin = Origin.parse(url)
        except ValueError as exc:
            raise ConfigError(f"engine_grpc: {exc}") from None
        if not origin.grpc:
            raise ConfigError(f"engine_grpc: must be HOST:PORT, or a grpc:// or grpcs:// URL, not {self.engine_grpc!r}")
        return origin

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on. Raises `ConfigError`."""
        try:
            _, colon, port = self.listen.rpartition(":")
            if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
                raise ValueError("must be HOST:PORT")
            is_name_and_port(f"{self.listen[: -len(port)]}{int(port) or 1}")
        except ValueError as exc:
            raise ConfigError(f"listen: {exc}, not {self.listen!r}") from None
        return self.listen[: -len(port) - 1].strip("[]"), int(port)


#: Its rows.
OPTIONS: tuple[Option, ...] = options_of(Settings)
