"""What stock SGLang was recorded to say, said to the whole proxy: its client gets the same bytes, or answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dyn_testkit.client import fetch
from tests.relay.harness import PROXY, world
from tests.relay.odd import scripted

CAPTURES = Path(__file__).parents[1] / "contract" / "captures"
#: These killed the engine, or are refused here before one sees them.
POISON = ("neg_id", "oov_id", "err_logprob_start_neg", "err_top_logprobs_huge")
#: Measured, dependent on the engine's cache, or sampled without a seed that counts.
VARIES = ("id", "cached_tokens", "cached_tokens_details", "e2e_latency", "queue_time", "decode_throughput")
TIMES = ("_ts", "_time", "_latency")
SAMPLED = ("sampled_seed", "sampled_top_p_k", "no_sampling_params")


def named(prefix: str) -> list[str]:
    found = sorted(CAPTURES.glob(f"*/{prefix}_*.wire"))
    names = [f"{path.parent.name}/{path.stem}" for path in found]
    return [name for name in names if name.partition("/")[2][2:] not in POISON and not name.startswith("kill/")]


def recorded(name: str) -> tuple[bytes, bytes]:
    """A request's body, and the wire bytes of its answer."""
    request = (CAPTURES / f"{name}.req").read_bytes()
    return request.partition(b"\r\n\r\n")[2], (CAPTURES / f"{name}.wire").read_bytes()


def asked_as(body: bytes, wire: bytes) -> bytes:
    """The body under the rid that the recorded engine made up for it: answers to another one are refused."""
    found = re.search(rb'"id":"([^"]+)"', wire)
    if found is None or b'"rid"' in body or not body.startswith(b"{"):
        return body
    return b'{"rid":"%b",' % found[1] + body[1:]


def answered(name: str) -> bool:
    """There is such a recording, and the engine lived to answer."""
    path = CAPTURES / f"{name}.wire"
    return path.exists() and path.stat().st_size > 0


def dechunked(wire: bytes) -> bytes:
    head, _, rest = wire.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return body
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


def settled(value: object) -> object:
    """A unary answer without what differs from run to run; logprobs to the engine's own accuracy."""
    if isinstance(value, dict):
        return {key: settled(item) for key, item in value.items() if key not in VARIES and not key.endswith(TIMES)}
    if isinstance(value, list):
        return [settled(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("name", named("s"))
async def test_a_streams_client_gets_the_recorded_bytes(autojump_clock, name):
    body, wire = recorded(name)
    async with world(plans=[]) as w:
        await scripted(w, wire)
        response = await fetch(w.network, PROXY, "/generate", asked_as(body, wire))
        assert response.complete
        assert response.status == int(wire.split(b" ", 2)[1])
        assert response.body == dechunked(wire)


@pytest.mark.parametrize("name", [name for name in named("s") if answered(name.replace("/s_", "/u_"))])
async def test_a_unary_client_gets_the_recorded_unary_answer(autojump_clock, name):
    """Folded from the recorded stream where the request is migratable; else the worker is asked as the client asked."""
    _, stream = recorded(name)
    asked, unary = recorded(name.replace("/s_", "/u_"))
    async with world(plans=[]) as w:
        worker = await scripted(w, stream)
        response = await fetch(w.network, PROXY, "/generate", asked_as(asked, stream))
        if response.header("x-dyn-relay-migratable") != "yes":
            worker.answer = unary
            response = await fetch(w.network, PROXY, "/generate", asked_as(asked, unary))
            assert response.body == dechunked(unary)
            return
        wanted = dechunked(unary)
        assert response.status == int(unary.split(b" ", 2)[1])
        if not any(name.endswith(odd) for odd in SAMPLED):
            got, want = json.loads(response.body), json.loads(wanted)
            assert settled(got) == settled(want)
            assert list(got) == list(want)
