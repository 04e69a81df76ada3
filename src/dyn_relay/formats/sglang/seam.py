"""Where the text of a continuation meets the text that was told.

An engine's detokenizer takes the last five ids of a prompt as context and tells what the output adds to their text
(SGLang 0.5.23, `detokenizer_manager.py`). In a continuation these ids are delivered ones, and it cannot know what was
told of them: half a character may still be owed, whose other half comes now; a leading space may be lost. So its first
text after a cut is not taken. The ids on both sides of the cut are decoded together, by the worker's own `/detokenize`,
and what they add to the text that was told is the answer's; from there on the engine's text fits again.

Until then events wait, ids and all, so that the text of what was delivered is never further behind than an engine's.
That is not long: the first event with text is what is asked about, or the last event.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from dyn_relay.formats.base import CannotComplete, Event, Outbound
from dyn_relay.formats.sglang.events import DONE, Delta, Kind, delta_decoder, kind
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.told import Told
from dyn_relay.formats.sglang.wire import Foreign, read

#: So many of a prompt's last ids are the context of an output's first ones.
CONTEXT = 5
#: Ids before the cut that are decoded; and how many, if that leaves doubts. All are then decoded once, too.
WINDOW, WIDE = 48, 2048
#: Ids at the cut whose text may be withheld: all but the last byte of a character.
UNSETTLED = 3
#: Characters at the end of an answer that show whether the token which ended it was told.
_LAST = 4
#: Characters of text that must agree.
COMPARED = 16
#: What stands for bytes that are no character yet. Stock withholds a text that ends in it.
REPLACEMENT = "\ufffd"

_PATH = "/detokenize"
_LISTS = UNSETTLED + 1


class _Texts(msgspec.Struct):
    text: list[str]


_texts = msgspec.json.Decoder(_Texts)


class _Finding(enum.Enum):
    FITS = "fits"
    LATER = "the text may not be told yet"
    ENTIRE = "more ids must be looked at"


class Seam:
    """That of one continuation. Every event goes through `take`; while there is a `question`, `reply` comes next.

    `delta` and `whole` give the text of an event that went on.
    """

    def __init__(
        self, request: Request, context: Sequence[int], ids: Sequence[int], told: Told, *, deltas: bool
    ) -> None:
        """`context`: the prompt's last ids. `ids`: all that were delivered. `deltas`: the worker's texts are deltas.

        Raises `CannotComplete` if a stop string may have begun.
        """
        #: What the worker must be asked before more can be taken.
        self.question: Outbound | None = None
        self._request = request
        self._context = list(context[-CONTEXT:])
        self._left = [*self._context, *ids]
        self._window = WINDOW
        #: All delivered ids are decoded, which tells what is owed of their text.
        self._entire = len(self._left) <= WINDOW
        self._told = told
        self._deltas = deltas
        #: Events that wait: those that were looked at, and those that came after.
        self._held: list[Event] = []
        self._later: list[Event] = []
        #: The output's ids so far, the engine's text of them, and whether they are all.
        self._ids: list[int] = []
        self._text = ""
        self._ended = False
        self._matched: object = None
        #: How often the engine has settled text. Text is decoded from where the one before the last was settled on, and
        #: byte tokens that begin inside a character spell none: after a cut inside one, the second settles that.
        self._settled = 0
        #: The text since the cut, and after how many characters of the engine's own that fits again.
        self._first = ""
        self._start = 0
        #: So many events go on without text; None while all wait.
        self._muted: int | None = None
        #: A delta has been `_first`.
        self._given = False
        if _begun(request.stops, told.tail, told.tail):
            raise CannotComplete("stop")

    @property
    def waits(self) -> bool:
        """Something came, and was held back."""
        return bool(self._held)

    def take(self, events: Sequence[Event]) -> Sequence[Event]:
        """The events that may go on. Raises `ValueError` for one that cannot be read."""
        if self._muted is not None:
            return events
        passed: list[Event] = []
        for at, event in enumerate(events):
            if self.question is not None:
                self._later += events[at:]
                break
            if self._holds(event):
                self._held.append(event)
            else:
                passed.append(event)
        return passed

    def reply(self, status: int, data: bytes) -> Sequence[Event]:
        """The answer to the question: the events that may go on.

        Raises `Foreign`, `NotJson` if the worker cannot tell, `CannotComplete` if the text cannot be made exact.
        """
        self.question = None
        if status != 200:
            raise Foreign(f"{_PATH} gave {status}")
        texts = read(_texts, data).text
        if len(texts) != 2 * _LISTS + 3:
            raise Foreign(f"{_PATH} gave {len(texts)} texts for {2 * _LISTS + 3} lists")
        match self._find(texts[:_LISTS], texts[_LISTS:-3], *texts[-3:]):
            case _Finding.ENTIRE:
                self._entire, self._window = True, WIDE
                self._ask()
                return ()
            case _Finding.LATER:
                later, self._later = self._later, []
                return self.take(later)
        held, self._held = self._held, []
        later, self._later = self._later, []
        self._muted = len(held) - 1
        return [*held, *later]

    def begin(self, text: str) -> str:
        """What the first event adds, whether its text is a delta or not."""
        self._given = self._tells(0)
        return self.whole(text, 0)

    def delta(self, text: str, number: int) -> str:
        """What any other event adds, if its text is a delta; asked once for each. `number`: events before it."""
        if not self._tells(number):
            return ""
        if self._given:
            return text
        self._given = True
        return self._first

    def whole(self, text: str, number: int) -> str:
        """The text since the cut, when `text` is all that the worker has told, after `number` events and one."""
        return self._first + text[self._start :] if self._tells(number) else ""

    def _tells(self, number: int) -> bool:
        return self._muted is not None and number >= self._muted

    def _holds(self, event: Event) -> bool:
        """Look at an event: does it wait? If it shows text, or is the last one, ask."""
        data = event[1]
        if not data:
            return False
        if data == DONE:
            return bool(self._held)
        piece = read(delta_decoder, data)
        word = kind(piece)
        if word is Kind.ERROR or piece.meta_info is None:
            self._held.clear()  # nothing of it was counted
            return False
        before = len(self._text)
        self._read(piece, word)
        if len(self._text) > before or self._ended:
            self._ask()
        return True

    def _read(self, piece: Delta, word: Kind) -> None:
        meta, ids = piece.meta_info, piece.output_ids
        assert meta is not None
        self._ended = word is not Kind.PROGRESS
        self._matched = meta.finish_reason and meta.finish_reason.matched
        if word is Kind.ABORT_ECHO:  # all text, and one id that is known
            self._text = piece.text
            return
        if not isinstance(ids, list):
            raise Foreign("an event without output_ids")
        self._text = self._text + piece.text if self._deltas else piece.text
        self._ids = [*self._ids, *ids] if self._deltas else ids
        if len(self._ids) != meta.completion_tokens:
            raise ValueError(f"{len(self._ids)} ids where completion_tokens is {meta.completion_tokens}")

    def _ask(self) -> None:
        new = self._ids
        if type(self._matched) is int and not self._request.keeps_stops:
            new = new[:-1]
        left = self._left[-self._window :]
        whole = [*left, *new]
        lists = [ids[: len(ids) - less] for ids in (left, whole) for less in range(_LISTS)]
        lists += [self._left[-CONTEXT:], self._context, [*self._left, *new] if self._entire else []]
        skip = self._request.parameter("skip_special_tokens") is not False
        body = msgspec.json.encode({"tokens": lists, "skip_special_tokens": skip})
        self.question = Outbound("POST", _PATH, body)

    def _find(self, left: Sequence[str], both: Sequence[str], near: str, context: str, entire: str) -> _Finding:
        """What the texts say: of ids before the cut, with those after it (each whole and shortened), and of all.

        `near`: of the ids that are the engine's own context.

        Raises `CannotComplete`.
        """
        if both[0].endswith(REPLACEMENT) and not self._ended:
            return _Finding.LATER
        clean, tail = not left[0].endswith(REPLACEMENT), self._told.tail
        sure = self._add_up(left, both)
        if not self._entire:
            compared = tail[-COMPARED:]
            if not clean or not sure or len(compared) < COMPARED or not left[0].endswith(compared):
                return _Finding.ENTIRE
            owed, added = 0, both[0][len(left[0]) :]
        else:
            end = len(context) + self._told.length
            owed, added = len(entire) - len(both[0]) + len(left[0]) - end, entire[end:]
            if not sure or not entire[:end].endswith(tail) or (clean and owed):
                raise CannotComplete("text")
        self._settled += bool(added)
        if not self._ended and self._settled < (1 if clean else 2):
            return _Finding.LATER
        # A stop string that begins in what is owed, or in the character that the cut is inside, would be missed.
        if not clean and _begun(self._request.stops, tail, tail + added, min(max(owed, 1), len(added))):
            raise CannotComplete("stop")
        first = self._trimmed(added)
        if len(first) < min(len(added), len(self._text)):
            # A part of the stop string was told, since half a character after it hid it: that is not taken back.
            if not clean or not added.startswith(self._text):
                raise CannotComplete("stop")
            first = self._text
        elif not self._agrees(first, clean and REPLACEMENT not in near and tail.endswith(near.lstrip())):
            # A token that ended the answer is told by an engine that has a use for it (SGLang 0.5.23: the one that
            # closes a tool call), and an id that its tokenizer does not know is told as another one.
            if type(self._matched) is not int or not clean or not self._text.startswith(first):
                raise CannotComplete("text")
            first = self._text
        self._first, self._start = first, len(self._text)
        return _Finding.FITS

    def _agrees(self, first: str, sure: bool) -> bool:
        """Is that what the engine itself told? `sure`: it has a whole text to begin at; else its first characters may
        be others."""
        if sure:
            return first == self._text
        return type(self._matched) is not int or first.endswith(self._text[-_LAST:])

    def _add_up(self, left: Sequence[str], both: Sequence[str]) -> bool:
        """Is a text that is whole still the beginning once more ids come?

        Not so for byte tokens of a sentencepiece model: a row of them that is not whole characters spells none at all.
        """
        whole = len(self._left) <= self._window
        settled = next((text for text in left if not text.endswith(REPLACEMENT)), "" if whole else None)
        last = next((text for text in (*both, *left) if not text.endswith(REPLACEMENT)), settled)
        return settled is not None and last is not None and both[0].startswith(settled) and both[0].startswith(last)

    def _trimmed(self, text: str) -> str:
        """Up to the stop string, if that ended the answer."""
        matched = self._matched
        if not isinstance(matched, str) or matched not in text:
            return text
        return text[: text.index(matched) + (len(matched) if self._request.keeps_stops else 0)]


def _begun(stops: Sequence[str], before: str, text: str, more: int = 0) -> bool:
    """May a stop string be in `text` of which a part is in `before`, or in `more` characters after it?

    An engine that continues has not seen that part, and would miss it.
    """
    starts = range(len(before) + more)
    return any(text.startswith(stop, at) or stop.startswith(text[at:]) for stop in stops for at in starts)
