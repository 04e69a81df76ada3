"""The request that most tests send."""

from __future__ import annotations

from typing import Any

from dyn_testkit.engine import Model
from dyn_testkit.oracle import Oracle

MODEL = Model()
ORACLE = Oracle(MODEL)


def generate(
    n: int = 8, *, stream: bool = True, sampling: dict[str, Any] | None = None, **extra: Any
) -> dict[str, Any]:
    """A migratable request for `n` tokens."""
    params = {"max_new_tokens": n, "temperature": 0, "ignore_eos": True, **(sampling or {})}
    return {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True, "stream": stream, **extra}
