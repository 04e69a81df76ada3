"""The prefix cache of one data-parallel rank, page by page, and the events that tell of it. Source: SGLang 0.5.23.

Only whole pages are kept. A page is named by the first eight bytes of SHA-256 over the digest of the pages before it
and its token ids. What is full forgets the leaf that has been used least recently.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: An event, as a map: what is published is this, or an array of its values.
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KvOptions:
    """How a mock worker keeps and publishes its prefix cache; names are those of SGLang's `--kv-events-config`."""

    page_size: int = 16
    #: Pages of each rank's cache.
    capacity: int = 1_000_000
    topic: str = "kv-events"
    #: Of rank 0; 0 lets the system choose.
    port: int = 0
    #: Offer a replay, of so many batches at most.
    replay: bool = True
    buffer_steps: int = 10_000
    #: Tell pages that follow each other in one event.
    coalesce: bool = True
    #: Events are arrays, as older versions sent them.
    arrays: bool = False
    #: The number of the first batch.
    first: int = 0


@dataclass(slots=True, eq=False)
class _Page:
    name: int
    parent: _Page | None
    tokens: tuple[int, ...]
    used: int
    children: int = 0


class KvCache:
    """The pages of one rank. `tell` gets the events of each change, in order, never none."""

    def __init__(self, page_size: int, capacity: int, tell: Callable[[list[Event]], None], *, coalesce: bool) -> None:
        """`capacity` in pages. `coalesce`: pages that follow each other are told in one event."""
        self._size = page_size
        self._capacity = capacity
        self._tell = tell
        self._coalesce = coalesce
        self._pages: dict[bytes, _Page] = {}
        self._time = 0

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are there. Uses them."""
        self._time += 1
        length = 0
        for digest, _ in self._chunks(tokens):
            if digest not in self._pages:
                break
            self._pages[digest].used = self._time
            length += self._size
        return length

    def insert(self, tokens: Sequence[int]) -> None:
        """Keep the whole pages of a sequence."""
        self._time += 1
        events: list[Event] = []
        parent: _Page | None = None
        for digest, chunk in self._chunks(tokens):
            page = self._pages.get(digest)
            if page is None:
                name = int.from_bytes(digest[:8], signed=True)
                page = self._pages[digest] = _Page(name, parent, chunk, self._time)
                if parent is not None:
                    parent.children += 1
                self._stored(events, page)
            page.used = self._time
            parent = page
        self._evict(events)
        if events:
            self._tell(events)

    def forget(self) -> None:
        """Keep nothing, and tell nobody."""
        self._pages.clear()

    def clear(self) -> None:
        """`/flush_cache`."""
        self.forget()
        self._tell([{"type": "AllBlocksCleared"}])

    def evict(self, pages: int) -> None:
        """Forget so many pages, as if others needed the room."""
        events: list[Event] = []
        for _ in range(min(pages, len(self._pages))):
            self._drop_one(events)
        if events:
            self._tell(events)

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        digest = b""
        for at in range(0, len(tokens) - self._size + 1, self._size):
            chunk = tuple(tokens[at : at + self._size])
            digest = hashlib.sha256(digest + struct.pack(f"<{self._size}I", *chunk)).digest()
            yield digest, chunk

    def _stored(self, events: list[Event], page: _Page) -> None:
        parent = None if page.parent is None else page.parent.name
        last = events[-1] if events and self._coalesce else None
        if last is not None and last["block_hashes"][-1] == parent:
            last["block_hashes"].append(page.name)
            last["token_ids"].extend(page.tokens)
            return
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": [page.name],
                "parent_block_hash": parent,
                "token_ids": list(page.tokens),
                "block_size": self._size,
                "lora_id": None,
                "medium": "GPU",
            }
        )

    def _evict(self, events: list[Event]) -> None:
        while len(self._pages) > self._capacity:
            self._drop_one(events)

    def _drop_one(self, events: list[Event]) -> None:
        leaves = (item for item in self._pages.items() if not item[1].children)
        digest, page = min(leaves, key=lambda item: item[1].used)
        del self._pages[digest]
        if page.parent is not None:
            page.parent.children -= 1
        last = events[-1] if events and self._coalesce else None
        if last is not None and last["type"] == "BlockRemoved":
            last["block_hashes"].append(page.name)
        else:
            events.append({"type": "BlockRemoved", "block_hashes": [page.name], "medium": "GPU"})
