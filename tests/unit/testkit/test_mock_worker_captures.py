"""The mock worker's answers have the form of recorded ones: heads, framing, keys and their order, error texts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dyn_relay.net import Connection
from dyn_testkit.engine import Model
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions

CAPTURES = Path(__file__).parent / "captures"
MODEL = Model(vocab_size=1024, context_length=2048)
OPTIONS = {
    "cumulative": WorkerOptions(model=MODEL, grammar_backend=False),
    "incremental": WorkerOptions(model=MODEL, grammar_backend=False, dialect="incremental"),
    "tokenizer": WorkerOptions(model=MODEL, skip_tokenizer_init=False),
}
#: The engine dies of these.
DEADLY = {"s_err_top_logprobs_huge", "u_err_top_logprobs_huge"}
#: Recorded from a server that was already dying, and one stream in which the server coalesced two tokens.
NOT_HERE = {f"cumulative/{stem}" for stem in (*DEADLY, "s_err_logprob_start_neg", "s_logprob")}
#: What only a real server has to say.
LESS = {"info_model_info": {"embedding"}, "info_v1_loads": {"memory", "disaggregation", "queues"}}
NAMES = sorted(f"{path.parent.name}/{path.stem}" for path in CAPTURES.glob("*/*.req") if path.parent.name in OPTIONS)


def shape(value: Any, key: str = "") -> Any:
    """Keys in order, lengths of lists, kinds of leaves; error texts as they are."""
    if key in ("cached_tokens_details", "dp_rank"):
        return "cache or place"
    if isinstance(value, dict):
        return [(name, shape(item, name)) for name, item in value.items()]
    if isinstance(value, list):
        return [shape(item) for item in value]
    if isinstance(value, str) and key in ("message", "error", "detail", "type", "err_type", "status"):
        return re.sub(r"(?s)^(\d validation error).*", r"\1", value)
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        return type(value).__name__
    return value


def split(wire: bytes) -> tuple[list[bytes], bytes]:
    """Head lines with the measured values masked, and the body."""
    head, _, body = wire.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    return [re.sub(rb"^(date|content-length): .*", rb"\1", line) for line in lines], body


def chunks(body: bytes) -> list[bytes]:
    """The chunks of a chunked body, the last one (empty) included; fails if the framing is not the plain one."""
    found = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        assert size == b"%x" % length
        found.append(body[:length])
        assert body[length : length + 2] == b"\r\n"
        body = body[length + 2 :]
    return found


def body_shape(lines: list[bytes], body: bytes) -> Any:
    if b"Transfer-Encoding: chunked" in lines:
        parts = [re.fullmatch(rb"(?s)data: (.*)\n\n", part) for part in chunks(body)[:-1]]
        texts = [part.group(1) for part in parts if part is not None]
        assert len(texts) == len(parts)
        return [text if text == b"[DONE]" else shape(json.loads(text)) for text in texts]
    if b"content-type: application/json" in lines and body:
        compact = json.loads(body)
        assert not re.search(rb'[,:] "', body) or b"message" in body, "not compact"
        return shape(compact)
    return body


async def exchange(connection: Connection, request: bytes) -> bytes:
    await connection.send(request)
    got = b""
    while data := await connection.receive():
        got += data
    return got


def without(found: Any, keys: set[str]) -> Any:
    if isinstance(found, list):
        kept = [item for item in found if not (isinstance(item, tuple) and item[0] in keys)]
        return [without(item, keys) for item in kept]
    if isinstance(found, tuple):
        return (found[0], without(found[1], keys))
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_HERE])
async def test_same_form(name: str) -> None:
    folder, _, stem = name.partition("/")
    request = (CAPTURES / f"{name}.req").read_bytes()
    recorded_lines, recorded_body = split((CAPTURES / f"{name}.wire").read_bytes())
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 31001, OPTIONS[folder]) as worker:
        lines, body = split(await exchange(await network.connect("worker", worker.port), request))
    assert lines == recorded_lines
    wanted = without(body_shape(recorded_lines, recorded_body), LESS.get(stem, set()))
    assert body_shape(lines, body) == wanted


@pytest.mark.parametrize("stem", sorted(DEADLY))
async def test_deadly_requests_end_as_recorded(stem: str) -> None:
    """The engine dies: a stream has its head and no chunk, a unary answer no byte."""
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 31001, OPTIONS["cumulative"]) as worker:
        request = (CAPTURES / "cumulative" / f"{stem}.req").read_bytes()
        wire = await exchange(await network.connect("worker", worker.port), request)
        recorded = (CAPTURES / "cumulative" / f"{stem}.wire").read_bytes()
        assert split(wire) == split(recorded)
        assert not worker.alive


def test_the_shape_sees_order_and_framing() -> None:
    assert shape({"a": 1, "b": 2}) != shape({"b": 2, "a": 1})
    assert shape([1, None]) != shape([1, 2])
    with pytest.raises(AssertionError):
        chunks(b"0A\r\n0123456789\r\n0\r\n\r\n")
