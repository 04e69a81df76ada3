"""What clients ask of a fleet over time, as far as its caches and queues are concerned.

A trace is a file of JSON lines, gzipped if its name ends in `.gz`. The first is its head,
`{"trace": "dyn-routing", "version": 1, "block": 64}`; each other one is a request:

| key | what |
|---|---|
| `at` | seconds: from the beginning, or, with `after`, from the end of that request |
| `after` | the request (0 is the first) that must have ended before, a session's turn before; or null |
| `key` | what its client calls the session, or "" |
| `prompt`, `answer` | blocks of `block` tokens, as runs: `[[7, 3], [40, 2]]` is 7, 8, 9, 40, 41 |

A block's number stands for its tokens *and all before them*, as engines' hashes do: prompts that begin with the same
numbers begin with the same tokens. An answer's blocks come after its prompt's, and may be a part of a later prompt.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, cast

#: Tokens.
BLOCK = 64
_HEAD = {"trace": "dyn-routing", "version": 1, "block": BLOCK}

#: (first, count) each.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    at: float
    prompt: Runs
    answer: Runs
    key: str = ""
    after: int | None = None

    @property
    def prompt_blocks(self) -> list[int]:
        """One by one."""
        return _blocks(self.prompt)

    @property
    def answer_blocks(self) -> list[int]:
        """One by one."""
        return _blocks(self.answer)


def _blocks(runs: Runs) -> list[int]:
    return list(chain.from_iterable(range(first, first + count) for first, count in runs))


def write(path: Path, calls: Iterable[Call]) -> None:
    """Make the file."""
    with _opened(path, "wt") as file:
        file.write(json.dumps(_HEAD) + "\n")
        for call in calls:
            row = {"at": call.at, "after": call.after, "key": call.key, "prompt": call.prompt, "answer": call.answer}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def read(path: Path) -> Iterator[Call]:
    """The requests in a file. Raises `ValueError` if it is no such trace."""
    with _opened(path, "rt") as file:
        try:
            head = json.loads(file.readline())
        except ValueError:
            head = None
        if head != _HEAD:
            raise ValueError(f"{path}: no trace of this version: its first line is not {json.dumps(_HEAD)}")
        for line in file:
            row = json.loads(line)
            yield Call(row["at"], _runs(row["prompt"]), _runs(row["answer"]), row["key"], row["after"])


def _runs(rows: list[list[int]]) -> Runs:
    return tuple((first, count) for first, count in rows)


def _opened(path: Path, mode: str) -> IO[str]:
    return cast("IO[str]", gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode))
