"""What the tests of the mock worker share."""

from __future__ import annotations

from typing import Any

from dyn_testkit.client import Response
from dyn_testkit.engine import Model
from dyn_testkit.oracle import Oracle
from dyn_testkit.worker import Dialect, WorkerOptions

MODEL = Model(vocab_size=300, context_length=2000, eos_rate=0.02)
ORACLE = Oracle(MODEL)
DIALECTS: tuple[Dialect, ...] = ("cumulative", "incremental", "mixed")


def body(count: int = 5, *, stream: bool = False, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return {"input_ids": [7, 8, 9], "sampling_params": params, "stream": stream} | more


def options(**more: Any) -> WorkerOptions:
    return WorkerOptions(**{"model": MODEL, "tick": 1.0} | more)


def finishes(response: Response) -> list[Any]:
    return [value["meta_info"]["finish_reason"] for value in response.values()]
