"""Rows that a trainer replays: the experts that each token was routed to, the positions that an indexer chose for it.

SGLang 0.5.23 tells them with the finish only, spelled as the codec knows, with a row for each position of prompt and
output from a start on, but the last one (batch_result_processor.py:136, :181; state_capturer/base.py:173). The prompt
of a continuation is all that was there, so its finish has all rows, and those of positions that an earlier worker went
through are *computed again*: the shape is right, and the client is told which.

How wide a row is nobody says, and it counts: see `widths.py`.

A worker may tell rows before its finish; then they are the client's. Those of positions that were delivered stay those
of the worker that sampled from them, and the ones of a later worker follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Raw

from dyn_relay.formats.sglang.codec import Codec, spliced
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.widths import Widths
from dyn_relay.formats.traits import Traits

#: A field of `meta_info`, and the switch of a request that asks for it.
SWITCHES = {"routed_experts": "return_routed_experts", "indexer_topk": "return_indexer_topk"}


class Replay:
    """One field over all attempts of an answer. Positions count from the prompt's first token."""

    __slots__ = (
        *("_codec", "_intervals", "_kept", "_start", "_told", "_width"),
        *("key", "name", "owed", "recomputed", "widths", "worker"),
    )

    def __init__(self, name: str, start: int, codec: Codec) -> None:
        self.name = name
        self._codec = codec
        #: How an event that has it spells its name.
        self.key = b'"%b"' % name.encode()
        #: The client must get it: the worker that was to answer has not said that it does not tell it.
        self.owed = True
        #: Half-open, in what the client was shown last: see the head of the file.
        self.recomputed: list[tuple[int, int]] = []
        #: What is known of the model that the current attempt's worker runs.
        self.widths = Widths()
        #: What tells that worker's process from others; None if nothing does, or if two make the rows.
        self.worker: str | None = None
        self._start = start
        #: Rows of ended attempts, from the start on, bytes of each of them (0 if there are none), and those of them
        #: that were computed again.
        self._kept = bytearray()
        self._width = 0
        self._intervals: list[tuple[int, int]] = []
        #: The newest value of the current attempt, and how many tokens the answer had then.
        self._told: tuple[Raw, int] | None = None

    def rows(self, length: int) -> int:
        """How many rows there are of a sequence."""
        return max(length - 1 - self._start, 0)

    def check(self, value: Raw, length: int) -> int:
        """Bytes of a row. Raises `ValueError` unless these are the rows of a sequence, as wide as others have them."""
        width = self._look(value, self.rows(length))
        if not self.widths.fits(width):
            known = " or ".join(map(str, sorted(self.widths.sure)))
            raise ValueError(f"{self.name}: rows of {width} bytes, where others have {known}")
        return width

    def curious(self, length: int) -> bool:
        """Would the rows of a sequence, from the current attempt's worker, teach how wide they are?"""
        return self.widths.curious(self.worker, self.rows(length))

    def learn(self, value: Raw, length: int) -> None:
        """Learn that; whatever the value is."""
        try:
            self._look(value, self.rows(length))
        except ValueError:
            return

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
        # Looked at twice: it is not known to be rows, and nothing is kept of what is none.
        width = self.check(value, prompt + seen)
        rows = self._with_kept(value, prompt + seen, width)
        self._intervals = self._again(prompt, before)
        del rows[self.rows(prompt + tokens) * width :]
        self._kept, self._width = rows, width

    def shown(self, value: Raw, prompt: int, before: int, tokens: int) -> Raw:
        """An event's value in the client's view; numbers as in `settle`. Sets `recomputed`.

        Raises `ValueError` if it has not the rows of the sequence.
        """
        self.recomputed = self._again(prompt, before)
        if not self._kept:
            self.check(value, prompt + tokens)
            return value
        return self._codec.encode(self.name, self._with_kept(value, prompt + tokens, self._width))

    def _again(self, prompt: int, before: int) -> list[tuple[int, int]]:
        """The earlier ones, and what an attempt after `before` tokens computes again: all but the rows that are kept.

        The last position that there was has been sampled, and not gone through.
        """
        since = self._start + (len(self._kept) // self._width if self._width else 0)
        until = prompt + before - 1 if before else 0
        return [*self._intervals, (since, until)] if since < until else self._intervals

    def _look(self, value: Raw, count: int) -> int:
        width = self._codec.width(self.name, value, count, self._width)
        self.widths.hear(self.worker, count, width)
        return width

    def _with_kept(self, value: Raw, length: int, width: int) -> bytearray:
        """The rows of a sequence, of which those that are kept stay. Raises `ValueError` if it has not as many."""
        return spliced(self._kept, self._codec.rows(self.name, value, self.rows(length), width))


def replays_of(request: Request, codec: Codec) -> list[Replay]:
    """One for each field that a request asks for."""
    start = request.value("routed_experts_start_len")
    first = start if type(start) is int and start > 0 else 0
    return [
        Replay(name, first if name == "routed_experts" else 0, codec)
        for name, switch in SWITCHES.items()
        if request.asks(switch)
    ]


def meet(
    replays: Iterable[Replay], widths: Mapping[tuple[str | None, str], Widths], worker: Traits, *, alone: bool
) -> None:
    """An attempt begins at a worker, which is `alone` if no prefill worker gives the prompt's rows."""
    for replay in replays:
        replay.widths = widths[worker.model, replay.name]
        replay.worker = worker.epoch if alone else None
