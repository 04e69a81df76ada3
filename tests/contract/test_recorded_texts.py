"""The texts of every recorded answer, told again by the testkit's detokenizer from the recorded ids."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import captured
import pytest

from dyn_testkit.detokenizer import UNARY_INTERVAL, Detokenizer
from dyn_testkit.engine import Sampling
from dyn_testkit.tokenizer import ByteLevel


def recorded_tokenizer() -> ByteLevel:
    """The one of the recorded server (`tests/live/make_models.py`): 256 bytes and pairs of letters, 1024 ids in all.

    GPT-2 spells bytes that print as themselves, others as characters from U+0100 on; its alphabet is in this order.
    """
    printing = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    alphabet = [bytes((byte,)) for byte in (*printing, *(byte for byte in range(256) if byte not in printing))]
    letters = [piece for piece in alphabet if piece.isalnum()]
    pairs = [first + second for first in letters for second in letters]
    special = ("<pad>", "<eos>", "<bos>", "<unk>")
    return ByteLevel(special, (*alphabet, *pairs)[: 1024 - len(special)])


TOKENIZER = recorded_tokenizer()
TOLD = [name for name in captured.names("tokenizer", "") if name.partition("/")[2][:2] in ("s_", "u_")]


def prompts(body: dict[str, Any]) -> list[list[int]]:
    ids: Any = body.get("input_ids")
    if ids is None:
        return [TOKENIZER.encode(body["text"])]
    return [ids] if isinstance(ids[0], int) else ids


def values(answer: captured.Wire) -> Iterator[dict[str, Any]]:
    """The answers, or events of them, in a recorded exchange that went well."""
    if answer.status != 200 or not answer.body:
        return
    stream = answer.body.startswith(b"data: ")
    found = (data for _, data in answer.events) if stream else iter([answer.body])
    for data in found:
        value = None if data.strip() == b"[DONE]" else json.loads(data)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and "meta_info" in one and not aborted(one):
                yield one


def aborted(value: dict[str, Any]) -> bool:
    return (value["meta_info"]["finish_reason"] or {}).get("type") == "abort"


def retold(name: str) -> int:
    """Tell all texts of a recording again; returns how many there were."""
    body = json.loads(captured.body(name))
    params = body.get("sampling_params") or {}
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    stream = name.partition("/")[2].startswith("s_")
    for at, value in enumerate(values(captured.wire(name))):
        groups[value.get("index", 0) if stream else at].append(value)
    count = 0
    for index, told in groups.items():
        asked = prompts(body)
        prompt = asked[index * len(asked) // max(len(groups), len(asked))]
        mine = params[index] if isinstance(params, list) else params
        detokenizer = Detokenizer(TOKENIZER, prompt, Sampling.parse(mine))
        text, known = "", 0
        for value in told:
            ids, finish = value["output_ids"], value["meta_info"]["finish_reason"]
            while not stream and len(ids) - known > UNARY_INTERVAL:
                text += detokenizer.push(ids[known : known + UNARY_INTERVAL])
                known += UNARY_INTERVAL
            text += detokenizer.push(ids[known:], finish)
            known = len(ids)
            assert text == value["text"]
            count += 1
    return count


@pytest.mark.parametrize("name", TOLD)
def test_the_recorded_texts(name: str) -> None:
    retold(name)


def test_how_many_there_are() -> None:
    """No vacuous pass; characters in parts are among them."""
    assert sum(map(retold, TOLD)) > 200
    bodies = b"".join(captured.wire(name).body for name in TOLD)
    assert bodies.count("\ufffd".encode()) > 50
