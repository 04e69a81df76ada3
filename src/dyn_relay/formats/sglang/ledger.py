"""What has been delivered: the ledger of a logical request, and the account of its current attempt."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from msgspec import Raw

from dyn_relay.formats.sglang.dialect import Dialect
from dyn_relay.formats.sglang.prefilled import Prefilled
from dyn_relay.formats.sglang.replay import Replay
from dyn_relay.formats.sglang.seam import Seam
from dyn_relay.formats.sglang.spans import Span, of_marks
from dyn_relay.formats.sglang.told import Told
from dyn_relay.formats.sglang.wire import Fields, inside, read_rows


class Rows:
    """A list with one element a token, as bytes: what stands between its brackets, and how many elements that is."""

    __slots__ = ("count", "text")

    def __init__(self) -> None:
        self.count = 0
        self.text = bytearray()

    def add(self, value: Raw) -> None:
        """Append the elements of an array. Raises `Foreign`, `NotJson`."""
        rows = len(read_rows(value))
        if rows:
            if self.count:
                self.text += b","
            self.text += inside(value)
            self.count += rows

    def cut(self, count: int, size: int) -> None:
        """Drop what came after `count` elements, which are `size` bytes."""
        self.count = count
        del self.text[size:]

    def extend(self, other: Rows) -> None:
        """Append the elements of another list."""
        if other.count:
            if self.count:
                self.text += b","
            self.text += other.text
            self.count += other.count


#: A counter's value: a number, or a histogram.
Count = int | float | list[int]


@dataclass(slots=True)
class Counter:
    """A counter over the ended attempts that told it, and the tokens that they delivered."""

    value: Count
    tokens: int


class Ledger:
    """Over all ended attempts: the tokens that the client has (streams) or that are safe here (unary)."""

    __slots__ = (
        "draws",
        "first",
        "first_body",
        "first_token",
        "ids",
        "last_delta",
        "lists",
        "opened",
        "replays",
        "rows",
        "spans",
        "sums",
        "template",
        "text",
        "told",
    )

    def __init__(self, replays: dict[str, Replay]) -> None:
        #: Of each ended attempt that gave tokens: its worker has said that it is deterministic.
        self.draws: list[bool] = []
        #: What the client asked for, by field.
        self.replays = replays
        #: When the first attempt was dispatched and when the first token came, on the caller's clock.
        self.opened = 0.0
        self.first_token: float | None = None
        #: Token ids. Those of a cumulative stream get here only when its attempt ends.
        self.ids = array("I")
        #: Per-token lists, `output_ids` among them, where the client's view needs them whole.
        self.rows: dict[str, Rows] = {}
        self.spans: list[Span] = []
        #: Counters that add up over attempts, as far as the ended attempts told them.
        self.sums: dict[str, Counter] = {}
        #: The lists of the first attempt with tokens that have one element a token: a continuation must have them too.
        self.lists: frozenset[str] = frozenset()
        #: Prompt metadata of the first attempt that told any; None until then.
        self.first: Fields | None = None
        #: The same of the event's top level.
        self.first_body: Fields = {}
        #: The newest event in the client's view, (top level, meta_info), from which a local finish is made.
        self.template: tuple[Fields, Fields] | None = None
        #: How many tokens that event brought.
        self.last_delta = 0
        #: Answers carry text; None until one has come.
        self.text: bool | None = None
        #: That text, as the client knows it.
        self.told = Told()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What an attempt's account was before an event."""

    newest: bytes
    tokens: int
    last_delta: int
    marks: int
    #: Of each gathered list, its elements and bytes.
    pieces: dict[str, tuple[int, int]]
    #: Characters that were told.
    told: int


class Attempt:
    """One attempt's account. `base` tokens were in the ledger when it began."""

    __slots__ = (
        "base",
        "body",
        "checkpoint",
        "deltas",
        "deterministic",
        "detokenizes",
        "dialect",
        "echo",
        "events",
        "expected",
        "fresh",
        "held",
        "hint",
        "interval",
        "last_delta",
        "marks",
        "newest",
        "not_rows",
        "number",
        "opening",
        "pieces",
        "prefilled",
        "rid",
        "seam",
        "shown",
        "started",
        "stated",
        "stencils",
        "tokens",
        "told",
        "version",
    )

    def __init__(self, number: int, rid: str, base: int, started: float, hint: Dialect | None, interval: int) -> None:
        self.number = number
        self.rid = rid
        self.base = base
        self.started = started
        #: What the worker is known to speak, None if it does not say.
        self.hint = hint
        #: Tokens between two events, 0 if unknown.
        self.interval = interval
        #: Of an attempt at a pair: what its prefill worker has said.
        self.prefilled: Prefilled | None = None
        #: How it makes text of tokens is known.
        self.detokenizes = False
        #: What it has shown to speak.
        self.dialect: Dialect | None = None
        #: Its ids are known to be deltas; read for each event.
        self.deltas = False
        self.tokens = 0
        self.last_delta = 0
        self.events = 0
        #: The newest event's data as it came.
        self.newest = b""
        #: The data of an abort echo: its rows are whole in every dialect, its ids are no deltas.
        self.echo = b""
        #: The newest event in the client's view, where that differs.
        self.body: tuple[Fields, Fields] | None = None
        #: The same, if it is only known as JSON.
        self.shown = b""
        #: Stencils that were made of its events.
        self.stencils = 0
        #: Points where the scalar weight_version changed, in this attempt's tokens.
        self.marks: list[tuple[int, object]] = []
        self.version: object = None
        #: What the worker's infos said of it before its first token; None if nothing.
        self.expected: object = None
        #: The engine's own word on them, from its first token on.
        self.stated: list[Span] = []
        #: The worker has said that it is.
        self.deterministic = False
        #: Before the first of them that came inside an event of several tokens: which of them made them is not known.
        self.checkpoint: Checkpoint | None = None
        #: Per-token lists gathered from deltas.
        self.pieces: dict[str, Rows] = {}
        #: Unknown lists that were seen not to line up with the tokens.
        self.not_rows: set[str] = set()
        #: If it continues an answer with text.
        self.seam: Seam | None = None
        #: Its text in the client's view, as far as it is known event by event; what the first added, and the newest.
        self.told = Told()
        self.opening = self.fresh = ""
        #: A first event that waits until its dialect shows.
        self.held: bytes = b""

    def change(self, version: object, tokens: int, *, keep: bool) -> None:
        """The newest event brings `tokens` tokens and another `version`. `keep`: the attempt may go back before it.

        Its text has been said, its lists are not gathered yet.
        """
        before = self.version if self.tokens else self.expected
        if keep and self.checkpoint is None and tokens > 1 and None not in (before, version) and before != version:
            pieces = {name: (rows.count, len(rows.text)) for name, rows in self.pieces.items()}
            told = self.told.length - len(self.fresh)
            self.checkpoint = Checkpoint(self.newest, self.tokens, self.last_delta, len(self.marks), pieces, told)
        self.version = version
        self.marks.append((self.tokens, version))

    def state(self, spans: list[Span]) -> None:
        """The engine says itself which weights made its tokens so far."""
        self.stated, self.checkpoint = spans, None

    def go_back(self) -> bool:
        """Forget the tokens from the checkpoint on; False if there is none."""
        kept, self.checkpoint = self.checkpoint, None
        if kept is None:
            return False
        self.newest, self.tokens, self.last_delta = kept.newest, kept.tokens, kept.last_delta
        del self.marks[kept.marks :]
        self.pieces = {name: self.pieces[name] for name in kept.pieces}
        for name, sizes in kept.pieces.items():
            self.pieces[name].cut(*sizes)
        self.told.cut(kept.told)
        return True

    def say(self, text: str) -> None:
        """The next event's text, a delta."""
        self.fresh = text if self.seam is None else self.seam.delta(text, self.events)
        self.told.add(self.fresh)

    def since(self, text: str) -> str:
        """All of its text in the client's view, when `text` is all that the worker has told."""
        return text if self.seam is None else self.seam.whole(text, self.events - (not self.echo))

    def spans(self) -> list[Span]:
        """Which weights made this attempt's tokens, in its own coordinates."""
        known = self.stated[-1].end if self.stated else 0
        seen = of_marks(self.marks, self.tokens)
        return [*self.stated, *(Span(one.version, max(one.start, known), one.end) for one in seen if one.end > known)]
