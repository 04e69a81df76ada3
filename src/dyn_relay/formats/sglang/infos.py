"""What `/server_info` says of the worker's KV events. Source: SGLang 0.5.23, `runtime_context.py`."""

from __future__ import annotations

import msgspec

from dyn_relay.formats.traits import KvEvents


class _Descriptor(msgspec.Struct):
    publisher: str
    endpoint_host: str
    endpoint_port_base: int
    block_size: int
    topic: str = ""
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None


def kv_events(value: object) -> KvEvents | None:
    """The descriptor; None for one that is missing, unreadable, or of another publisher than ZeroMQ."""
    try:
        said = msgspec.convert(value, _Descriptor)
    except msgspec.ValidationError:
        return None
    if said.publisher != "zmq" or said.block_size < 1 or said.dp_size < 1:
        return None
    ports = [port for port in (said.endpoint_port_base, said.replay_endpoint_port_base) if port is not None]
    if not all(0 < port <= 65536 - said.dp_size for port in ports):
        return None
    return KvEvents(
        host=said.endpoint_host,
        port=said.endpoint_port_base,
        topic=said.topic,
        block_size=said.block_size,
        ranks=said.dp_size,
        replay_port=said.replay_endpoint_port_base,
    )
