"""How published trainers read the rows of `routed_experts` and `indexer_topk` in an answer, rule by rule.

Each takes a whole answer (a stream is folded first), the prompt, the shape of a row, and gives the rows as it has them.
What does not fit its own rule raises `Misread`, as it does there; what a rule does not look at passes.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class Misread(ValueError):
    """The trainer would stop here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one row: layers, and numbers chosen in each."""

    layers: int
    chosen: int

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.layers * self.chosen


Row = tuple[int, ...]
Decoder = Callable[[Mapping[str, Any], Sequence[int], Shape, str], list[Row]]


def slime(answer: Mapping[str, Any], prompt: Sequence[int], shape: Shape, name: str = "routed_experts") -> list[Row]:
    """slime (`slime/utils/types.py`): ids are those of the logprobs; a start is told, or 0; the count must be exact."""
    meta = answer["meta_info"]
    ids = [entry[1] for entry in meta["output_token_logprobs"]]
    numbers = _numbers(meta, name)
    rows = len(prompt) + len(ids) - 1 - meta.get(f"{name}_start_len", 0)
    if len(numbers) != rows * shape.width:
        raise Misread(f"{len(numbers)} numbers, {rows} rows of {shape.width} wanted")
    return _rows(numbers, shape.width)


def miles(answer: Mapping[str, Any], prompt: Sequence[int], shape: Shape, name: str = "routed_experts") -> list[Row]:
    """miles (`generate_endpoint_utils.py`): reshaped to [tokens - 1, layers, chosen]; of experts and indexer alike."""
    meta = answer["meta_info"]
    numbers = _numbers(meta, name)
    rows = len(prompt) + len(meta["output_token_logprobs"]) - 1
    if len(numbers) != rows * shape.width:
        raise Misread(f"cannot reshape {len(numbers)} numbers into {rows, shape.layers, shape.chosen}")
    return _rows(numbers, shape.width)


def areal(answer: Mapping[str, Any], prompt: Sequence[int], shape: Shape, name: str = "routed_experts") -> list[Row]:
    """AReaL (`remote_inf_engine.py`): the engine's counts say how many rows; their width is what is left."""
    meta = answer["meta_info"]
    numbers = _numbers(meta, name)
    rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    if len(numbers) % rows:
        raise Misread(f"cannot reshape {len(numbers)} numbers into ({rows}, -1)")
    return _rows(numbers, len(numbers) // rows) if len(numbers) else [()] * rows


def verl(answer: Mapping[str, Any], prompt: Sequence[int], shape: Shape, name: str = "routed_experts") -> list[Row]:
    """verl (`llm_server.py`): reshaped to [-1, layers, chosen]; a resumed answer's last rows, one a token, are new."""
    numbers = _numbers(answer["meta_info"], name)
    if len(numbers) % shape.width:
        raise Misread(f"cannot reshape {len(numbers)} numbers into (-1, {shape.layers}, {shape.chosen})")
    rows, ids = _rows(numbers, shape.width), answer["output_ids"]
    if len(rows[-len(ids) :]) < len(ids):
        raise Misread(f"{len(rows)} rows for {len(ids)} tokens")
    return rows


DECODERS: Mapping[str, Decoder] = {one.__name__: one for one in (slime, miles, areal, verl)}


def _numbers(meta: Mapping[str, Any], name: str) -> array[int]:
    """int32, little-endian, in base64 (SGLang 0.5.23)."""
    value = meta.get(name)
    if value is None:
        raise Misread(f"no {name}")
    try:
        data = base64.b64decode(value, validate=True)
    except (TypeError, binascii.Error) as exc:
        raise Misread(f"{name}: {exc}") from exc
    if len(data) % 4:
        raise Misread(f"{name}: {len(data)} bytes are no int32")
    return array("i", data)


def _rows(numbers: Sequence[int], width: int) -> list[Row]:
    return [tuple(numbers[at : at + width]) for at in range(0, len(numbers), width)]
