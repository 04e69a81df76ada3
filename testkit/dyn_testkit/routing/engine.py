"""A model of an engine, as routing sees it: a prefix cache, a prefill that takes one at a time, slots that decode.

Blocks are cached once a prompt is prefilled, an answer's when it ends. What a running request uses is not evicted; of
the rest the least recently used goes first, an end before its beginning, as in SGLang's radix cache.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dyn_relay.fleet.target import Target
from dyn_testkit.routing.trace import BLOCK, Call


class Listener(Protocol):
    """Hears what engines say of their caches, as SGLang's KV events do: each block with the one before it."""

    def stored(self, target: Target, blocks: Sequence[int], parent: int | None, tokens: array[int]) -> None:
        """A row of blocks was cached; `parent`: the block before the first, None at the beginning of a prompt."""

    def removed(self, target: Target, blocks: Sequence[int]) -> None:
        """Blocks were evicted."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One engine's. Blocks are of `BLOCK` tokens; rates in tokens and seconds."""

    cache_blocks: int = 12_000
    slots: int = 64
    prefill_rate: float = 20_000.0
    #: Seconds a token when alone, and so many times as long when all slots are full.
    token_secs: float = 0.015
    slowdown: float = 2.0


#: (seconds from now, what then)
After = Callable[[float, Callable[[], None]], None]


class Engine:
    """The engine of one target."""

    def __init__(self, target: Target, hardware: Hardware, after: After, listener: Listener | None = None) -> None:
        self.target = target
        self.running = 0
        self._hardware = hardware
        self._after = after
        self._listener = listener
        self._waiting: deque[tuple[Call, Callable[[int], None], Callable[[], None]]] = deque()
        self._prefilling = False
        #: Blocks in use, by how many; and those in nobody's, the next to go first.
        self._used: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def submit(self, call: Call, prefilled: Callable[[int], None], ended: Callable[[], None]) -> None:
        """Take a request; `prefilled` is told, with the blocks that were reused, when its first token comes."""
        self._waiting.append((call, prefilled, ended))
        self._admit()

    def _admit(self) -> None:
        if not self._waiting or self._prefilling or self.running >= self._hardware.slots:
            return
        call, prefilled, ended = self._waiting[0]
        prompt, answer = call.prompt_blocks, call.answer_blocks
        if self.running and len(self._used) + len(prompt) + len(answer) > self._hardware.cache_blocks:
            return
        self._waiting.popleft()
        self.running += 1
        self._prefilling = True
        known = self._known(prompt)
        reused = min(known, len(prompt) - 1)  # the last token is always computed
        self._use(prompt)

        def done() -> None:
            self._prefilling = False
            self._say(prompt, known)
            prefilled(reused)
            pace = 1 + (self._hardware.slowdown - 1) * self.running / self._hardware.slots
            self._after(len(answer) * BLOCK * self._hardware.token_secs * pace, finish)
            self._admit()

        def finish() -> None:
            self.running -= 1
            self._use(answer)
            self._say(prompt + answer, len(prompt))
            self._release(prompt + answer)
            ended()
            self._admit()

        self._after((len(prompt) - reused) * BLOCK / self._hardware.prefill_rate, done)

    def _known(self, prompt: Sequence[int]) -> int:
        for at, block in enumerate(prompt):
            if block not in self._used and block not in self._idle:
                return at
        return len(prompt)

    def _use(self, blocks: Sequence[int]) -> None:
        used, idle = self._used, self._idle
        for block in blocks:
            users = used.get(block)
            if users is None:
                idle.pop(block, None)
                used[block] = 1
            else:
                used[block] = users + 1
        evicted = []
        while len(used) + len(idle) > self._hardware.cache_blocks and idle:
            evicted.append(idle.popitem(last=False)[0])
        if evicted and self._listener is not None:
            self._listener.removed(self.target, evicted)

    def _release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            users = self._used[block]
            if users > 1:
                self._used[block] = users - 1
            else:
                del self._used[block]
                self._idle[block] = None

    def _say(self, blocks: Sequence[int], known: int) -> None:
        """All but the `known` first are new."""
        if self._listener is not None and len(blocks) > known:
            tokens = tokens_of(blocks[known:])
            self._listener.stored(self.target, blocks[known:], blocks[known - 1] if known else None, tokens)


def tokens_of(blocks: Sequence[int]) -> array[int]:
    """Token ids that differ from block to block."""
    found = array("I")
    found.frombytes(b"".join([block.to_bytes(4, "little") * BLOCK for block in blocks]))
    return found
