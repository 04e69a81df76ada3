"""Deltas of any lengths: an engine that lags tells several tokens at once, and then one again."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dyn_relay.direct.answer import finished
from dyn_relay.direct.engine import Facts
from dyn_relay.direct.generate import Generation
from dyn_relay.direct.request import translate
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.status import Code, Refused

#: Wrong on purpose: what its messages are like an engine shows in each of them.
FACTS = Facts(known=1, incremental=False, tokenizer=False, paired=False, features=frozenset(), http_port=None)
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
    """One that streams these, and then ends as an aborted call does if there is no finish."""

    def __init__(self, told: list[pb.GenerateResponse]) -> None:
        self.channels = self
        self._told = told

    def hear(self) -> None:
        pass

    @asynccontextmanager
    async def call(self, method: Any, message: Any, *, metadata: Any, known: int):
        async def each():
            for one in self._told:
                yield one
            if not finished(self._told[-1]):
                raise Refused(Code.CANCELLED, "")

        yield each()


@pytest.mark.parametrize("interval", [None, 1, 2, 50])
async def test_every_delta_is_told(interval):
    sampling = {} if interval is None else {"stream_interval": interval}
    asked = translate({"input_ids": [1], "stream": True, "sampling_params": sampling})
    client: Any = Client()
    await Generation(Engine(messages()), FACTS, asked, [], client).run()
    events = [msgspec.json.decode(part.removeprefix(b"data: ")) for part in client.got.split(b"\n\n")[:-2]]
    assert [len(event["output_ids"]) for event in events] == list(LENGTHS)
    assert [token for event in events for token in event["output_ids"]] == list(range(sum(LENGTHS)))


@pytest.mark.parametrize("said", [True, False], ids=["an engine of deltas", "of all so far, as it said"])
@pytest.mark.parametrize("before", [1, 2, 3])
async def test_an_abort_repeats_no_delta(before, said):
    """Of one message nobody can tell whether it was a delta; then the engine's own word counts."""
    asked = translate({"input_ids": [1], "stream": True})
    client: Any = Client()
    facts = replace(FACTS, incremental=said)
    await Generation(Engine(messages()[:before]), facts, asked, [], client).run()
    *events, last = [msgspec.json.decode(part.removeprefix(b"data: ")) for part in client.got.split(b"\n\n")[:-2]]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert [len(event["output_ids"]) for event in events] == list(LENGTHS[:before])
    assert last["output_ids"] == ([] if before > 1 or said else [0])
