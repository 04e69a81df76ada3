"""What a worker says of its KV events."""

from __future__ import annotations

import json

import pytest

from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import KvEvents

#: As `/server_info` of SGLang 0.5.23 has it.
TOLD = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv-events",
    "block_size": 16,
    "dp_size": 2,
    "replay_endpoint_port_base": 5600,
}


def read(value: object) -> KvEvents | None:
    return SglangFormat().traits({"/server_info": json.dumps({"kv_events": value}).encode()}).kv_events


def test_a_descriptor() -> None:
    assert read(TOLD) == KvEvents("*", 5557, "kv-events", 16, 2, 5600)


def test_what_may_be_missing() -> None:
    least = {name: TOLD[name] for name in ("publisher", "endpoint_host", "endpoint_port_base", "block_size")}
    assert read(least) == KvEvents("*", 5557, "", 16, 1, None)
    assert read(TOLD | {"replay_endpoint_port_base": None, "load_topic": "load"}) == KvEvents(
        "*", 5557, "kv-events", 16, 2, None
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        "zmq",
        TOLD | {"publisher": "null"},
        TOLD | {"block_size": 0},
        TOLD | {"block_size": "16"},
        TOLD | {"dp_size": 0},
        TOLD | {"endpoint_port_base": 0},
        TOLD | {"endpoint_port_base": 65535},
        TOLD | {"replay_endpoint_port_base": -1},
        TOLD | {"endpoint_host": None},
    ],
    ids=str,
)
def test_what_cannot_be_followed(value: object) -> None:
    assert read(value) is None
