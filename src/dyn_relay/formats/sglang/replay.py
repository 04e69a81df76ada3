"""Rows that a trainer replays: the experts that each token was routed to, the positions that an indexer chose for it.

SGLang 0.5.23 tells them with the finish only, spelled as the codec knows, with a row for each position of prompt and
output from a start on, but the last one (batch_result_processor.py:136, :181; state_capturer/base.py:173). The prompt
of a continuation is all that was there, so its finish has all rows, and those of positions that an earlier worker went
through are *computed again*: the shape is right, and the client is told which.

A worker may tell rows before its finish; then they are the client's. Those of positions that were delivered stay those
of the worker that sampled from them, and the ones of a later worker follow.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Raw

from dyn_relay.formats.sglang.codec import Codec, spliced
from dyn_relay.formats.sglang.request import Request

#: A field of `meta_info`, and the switch of a request that asks for it.
SWITCHES = {"routed_experts": "return_routed_experts", "indexer_topk": "return_indexer_topk"}


class Replay:
    """One field over all attempts of an answer. Positions count from the prompt's first token."""

    __slots__ = ("_codec", "_intervals", "_kept", "_start", "_told", "_width", "key", "name", "owed", "recomputed")

    def __init__(self, name: str, start: int, codec: Codec) -> None:
        self.name = name
        self._codec = codec
        #: How an event that has it spells its name.
        self.key = b'"%b"' % name.encode()
        #: The client must get it: the worker that was to answer has not said that it does not tell it.
        self.owed = True
        #: Half-open, in what the client was shown last: see the head of the file.
        self.recomputed: list[tuple[int, int]] = []
        self._start = start
        #: Bytes of a row, 0 while unknown.
        self._width = 0
        #: Rows of ended attempts, from the start on, and those of them that were computed again.
        self._kept = b""
        self._intervals: list[tuple[int, int]] = []
        #: The newest value of the current attempt, and how many tokens the answer had then.
        self._told: tuple[Raw, int] | None = None

    def rows(self, length: int) -> int:
        """How many rows there are of a sequence."""
        return max(length - 1 - self._start, 0)

    def check(self, value: Raw, length: int) -> None:
        """Raise `ValueError` unless `value` has the rows of a sequence."""
        for _ in self._decoded(value, length):
            pass

    def note(self, value: Raw, tokens: int) -> None:
        """The current attempt tells the rows of an answer of so many tokens; not read yet."""
        self._told = value.copy(), tokens

    def settle(self, prompt: int, before: int, tokens: int) -> None:
        """The current attempt has ended: `tokens` are delivered, `before` of them by earlier ones.

        Raises `ValueError` if what it told are no rows.
        """
        told, self._told = self._told, None
        if told is None or tokens <= before:
            return
        value, seen = told
        rows = spliced(self._kept, self._decoded(value, prompt + seen))
        self._intervals = self._again(prompt, before)
        self._kept = bytes(rows[: self.rows(prompt + tokens) * self._width])

    def shown(self, value: Raw, prompt: int, before: int, tokens: int) -> Raw:
        """An event's value in the client's view; numbers as in `settle`. Sets `recomputed`.

        Raises `ValueError` if it has not the rows of the sequence.
        """
        self.recomputed = self._again(prompt, before)
        if not self._kept:
            self.check(value, prompt + tokens)
            return value
        return self._codec.encode(self.name, spliced(self._kept, self._decoded(value, prompt + tokens)))

    def _again(self, prompt: int, before: int) -> list[tuple[int, int]]:
        """The earlier ones, and what an attempt after `before` tokens computes again: all but the rows that are kept.

        The last position that there was has been sampled, and not gone through.
        """
        since = self._start + (len(self._kept) // self._width if self._width else 0)
        until = prompt + before - 1 if before else 0
        return [*self._intervals, (since, until)] if since < until else self._intervals

    def _decoded(self, value: Raw, length: int) -> Iterator[bytes]:
        """The rows of a sequence, in pieces. Raises `ValueError` if they are none."""
        width = yield from self._codec.rows(self.name, value, self.rows(length), self._width)
        self._width = width or self._width


def replays_of(request: Request, codec: Codec) -> list[Replay]:
    """One for each field that a request asks for."""
    start = request.value("routed_experts_start_len")
    first = start if type(start) is int and start > 0 else 0
    return [
        Replay(name, first if name == "routed_experts" else 0, codec)
        for name, switch in SWITCHES.items()
        if request.asks(switch)
    ]
