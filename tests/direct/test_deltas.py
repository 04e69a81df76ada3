"""Deltas of any lengths: an engine that lags tells several tokens at once, and then one again."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dyn_relay.direct.generate import Generation
from dyn_relay.direct.request import translate
from dyn_relay.grpc import sglang_pb2 as pb

LENGTHS = (1, 40, 1, 2, 1, 3)


def messages() -> list[pb.GenerateResponse]:
    made, so_far = [], 0
    for number, length in enumerate(LENGTHS):
        ids = range(so_far, so_far + length)
        so_far += length
        last = number == len(LENGTHS) - 1
        finish = '{"type": "length", "length": 48}' if last else "null"
        meta = {"finish_reason": finish, "completion_tokens": str(so_far), "prompt_tokens": "1"}
        made.append(pb.GenerateResponse(output_ids=ids, meta_info=meta, finished=last))
    return made


class Client:
    """The client's connection, as far as a stream needs one."""

    def __init__(self) -> None:
        self.started, self.connection, self.got = True, self, b""

    def frame(self, data: bytes, head: bytes, *, last: bool = False) -> bytes:
        return data

    async def send(self, data: bytes) -> None:
        self.got += data


class Engine:
    """One that streams deltas."""

    def __init__(self) -> None:
        self.channels = self

    async def facts(self, metadata: Any) -> Any:
        return SimpleNamespace(incremental=True)

    def hear(self) -> None:
        pass

    @asynccontextmanager
    async def call(self, method: Any, message: Any, *, metadata: Any):
        async def each():
            for one in messages():
                yield one

        yield each()


@pytest.mark.parametrize("interval", [None, 1, 2, 50])
async def test_every_delta_is_told(interval):
    sampling = {} if interval is None else {"stream_interval": interval}
    asked = translate({"input_ids": [1], "stream": True, "sampling_params": sampling})
    client: Any = Client()
    await Generation(Engine(), asked, [], client).run()
    events = [msgspec.json.decode(part.removeprefix(b"data: ")) for part in client.got.split(b"\n\n")[:-2]]
    assert [len(event["output_ids"]) for event in events] == list(LENGTHS)
    assert [token for event in events for token in event["output_ids"]] == list(range(sum(LENGTHS)))
