"""What the fleet is told of an attempt, so that it may go where its prefix is cached."""

from __future__ import annotations

from dyn_relay.config import Config
from dyn_relay.fleet.policies.base import Ask
from dyn_relay.formats.base import Exchange
from dyn_relay.http11.headers import Headers, get

#: SMG's: the client says itself which requests belong together.
ROUTING_KEY = "x-smg-routing-key"


def key_of(headers: Headers, exchange: Exchange, config: Config) -> str:
    """What names the session of a request: SMG's header, one of `--request-id-headers`, or what its body says."""
    for name in (ROUTING_KEY, *config.request_id_headers):
        value = get(headers, name.lower().encode())
        if value:
            return value.decode("latin-1")
    return exchange.session


def asking(exchange: Exchange, key: str, *, first: bool) -> Ask:
    """`first`: nothing was tried yet. The rank that a client asks for means nothing on another worker."""
    return Ask(
        exchange.generations,
        resumed=exchange.delivered > 0,
        key=key,
        prefix=exchange.prefix,
        cache_space=exchange.cache_space,
        rank=exchange.pinned if first else None,
    )
