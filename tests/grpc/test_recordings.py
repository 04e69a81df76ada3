"""What stock SGLang 0.5.23 said over gRPC, beside the same over HTTP (`tests/live/record.py` records both).

Not compared is what an engine measures, and an id that nobody chose.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from dyn_relay.direct import answer, errors
from dyn_relay.direct.request import translate
from dyn_relay.grpc import sglang_pb2 as pb

RECORDINGS = Path(__file__).parent / "recordings" / "stock-0.5.23.jsonl"
Exchange = dict[str, Any]
EXCHANGES: dict[str, Exchange] = {
    each["case"]: each for each in map(json.loads, RECORDINGS.read_text(encoding="utf-8").splitlines())
}
GENERATED = [case for case, each in EXCHANGES.items() if each["http"]["path"] == "/generate"]
BY_IDS = [case for case in GENERATED if EXCHANGES[case]["grpc"]["method"] == "Generate"]
ANSWERED = [case for case in BY_IDS if EXCHANGES[case]["grpc"]["code"] == "OK"]
REFUSED = [case for case in BY_IDS if EXCHANGES[case]["grpc"]["code"] != "OK"]

#: (text as JSON has it, what stands in its place)
MEASURED = (
    (re.compile(r'"(e2e_latency|response_sent_to_client_ts)":-?[0-9.e+-]+'), r'"\1":0'),
    (re.compile(r'"id":"(?!mine)[^"]+"'), '"id":""'),
)


def comparable(text: str) -> str:
    for pattern, instead in MEASURED:
        text = pattern.sub(instead, text)
    return text


def streams(exchange: Exchange) -> bool:
    return bool(exchange["http"]["body"].get("stream"))


def events(exchange: Exchange) -> list[str]:
    """The JSON texts of HTTP's answer, one a message."""
    said: str = exchange["http"]["answer"]
    if not streams(exchange):
        return [said]
    *parts, end, nothing = said.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [part.removeprefix("data: ") for part in parts]


def messages(exchange: Exchange) -> list[pb.GenerateResponse]:
    return [pb.GenerateResponse.FromString(b64decode(each)) for each in exchange["grpc"]["messages"]]


def test_there_are_recordings_of_every_kind() -> None:
    kinds = {
        (case.split("/")[0], streams(EXCHANGES[case]), EXCHANGES[case]["grpc"]["code"] == "OK") for case in GENERATED
    }
    flavours = {"grpc", "grpc-text", "grpc-text-incremental"}
    assert kinds == {(flavour, mode, fine) for flavour in flavours for mode in (True, False) for fine in (True, False)}


@pytest.mark.parametrize("case", BY_IDS)
def test_a_body_becomes_the_message(case: str) -> None:
    exchange = EXCHANGES[case]
    want = pb.GenerateRequest.FromString(b64decode(exchange["grpc"]["request"]))
    want.return_text, want.stream = True, streams(exchange)  # without a tokenizer there is none, and false is unset
    assert translate(exchange["http"]["body"]).message == want


@pytest.mark.parametrize("case", ANSWERED)
def test_messages_become_the_bytes_that_http_sends(case: str) -> None:
    exchange = EXCHANGES[case]
    made = [answer.render(message, None, 0.0).decode() for message in messages(exchange)]
    assert [*map(comparable, made)] == [*map(comparable, events(exchange))]
    assert [answer.finished(message) for message in messages(exchange)][-1]


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_becomes_the_one_of_http(case: str) -> None:
    exchange = EXCHANGES[case]
    made = errors.internal(exchange["grpc"]["details"], well=True)
    if streams(exchange):
        assert (exchange["http"]["status"], made.event) == (200, f"data: {events(exchange)[0]}\n\n".encode())
    else:
        assert (made.status, made.body.decode()) == (exchange["http"]["status"], exchange["http"]["answer"])
