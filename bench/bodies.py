"""Write the request bodies of the workloads, the same bytes every time: `python bodies.py FOLDER`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 7
#: name -> (prompt tokens, tokens to generate, other top-level fields)
BODIES: dict[str, tuple[int, int, dict[str, bool]]] = {
    "A": (128, 16, {}),
    "B": (1024, 256, {"stream": True, "return_logprob": True}),
    "D": (2048, 8192, {"return_logprob": True}),
    "E": (256, 120, {"stream": True, "return_logprob": True}),
    "soak": (256, 240, {"stream": True, "return_logprob": True}),
    "warm": (128, 2, {}),
}


def body(prompt_tokens: int, max_new_tokens: int, fields: dict[str, bool], rng: random.Random) -> bytes:
    """One `/generate` body as an RL client sends it: token ids in, sampling parameters, no text."""
    request: dict[str, object] = {
        "input_ids": [rng.randint(100, 151_000) for _ in range(prompt_tokens)],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
    }
    return json.dumps(request | fields, separators=(",", ":")).encode()


def write(folder: Path, name: str, prompt_tokens: int, max_new_tokens: int, fields: dict[str, bool]) -> str:
    """Write a body of lengths that a tool chooses itself; gives its name."""
    content = body(prompt_tokens, max_new_tokens, fields, random.Random(SEED))
    (folder / f"{name}.json").write_bytes(content)
    return name


def main() -> None:
    """Write one file a body."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    for name, (prompt_tokens, max_new_tokens, fields) in BODIES.items():
        (folder / f"{name}.json").write_bytes(body(prompt_tokens, max_new_tokens, fields, rng))


if __name__ == "__main__":
    main()
