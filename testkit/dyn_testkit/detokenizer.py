"""From ids to text, piece by piece, as SGLang's detokenizer process does it.

SGLang 0.5.23: `detokenizer_manager.py` (`_decode_batch_token_id_output`, `trim_matched_stop`, `_clamp_decode_ids`),
`schedule_batch.py` (`init_incremental_detokenize`), `sglang/utils.py` (`find_printable_text`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dyn_testkit.engine import Sampling
from dyn_testkit.tokenizer import REPLACEMENT, Tokenizer

#: So many of the prompt's last tokens are decoded with the output: what comes first depends on what is before it.
CONTEXT = 5
#: Of a unary request the detokenizer gets so many tokens at a time, and no stop string is waited for
#: (`output_streamer.py`).
UNARY_INTERVAL = 50

#: First and last code point of the blocks whose characters are words by themselves. Hangul and kana are not there.
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


class Detokenizer:
    """The text of one request's output.

    Text is settled once it does not end in U+FFFD; it is then what the last settled ids and those after them decode to,
    less what the former decode to alone. Of text that is not settled only whole words are told.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._ids = self._within(prompt[-CONTEXT:])
        #: Ids before `_settled` have given their text; those from `_context` on are decoded again with the new ones.
        self._context = 0
        self._settled = len(self._ids)
        self._text = ""
        #: Characters told, which may be more than are in `_text`.
        self._told = 0

    def push(self, ids: Sequence[int], finish: Mapping[str, Any] | None = None) -> str:
        """More text, for the output's next ids. `finish` is the finish reason, with the last ones: all text is told."""
        self._ids += self._within(ids)
        read = self._ids[self._context :]
        if finish is not None:
            read = self._untail(read, finish)
        before = self._decode(self._ids[self._context : self._settled])
        text = self._decode(read)[len(before) :]
        if finish is not None:
            return self._trimmed(self._text + text, finish)[self._told :]
        early = self._told - len(self._text)
        if text and not text.endswith(REPLACEMENT):
            self._text += text
            self._context, self._settled = self._settled, len(self._ids)
            self._told = len(self._text)
        else:
            text = _whole_words(text)
            self._told = len(self._text) + len(text)
        return text[early:]

    def _within(self, ids: Sequence[int]) -> list[int]:
        """Ids outside the vocabulary count as 0."""
        size = self._tokenizer.size
        return [token if token >= 0 and (size is None or token < size) else 0 for token in ids]

    def _decode(self, ids: Sequence[int]) -> str:
        sampling = self._sampling
        return self._tokenizer.decode(ids, sampling.skip_special_tokens, sampling.spaces_between_special_tokens)

    def _untail(self, ids: list[int], finish: Mapping[str, Any]) -> list[int]:
        """Without the stop token, which is the last one."""
        trims = isinstance(finish.get("matched"), int) and not self._sampling.no_stop_trim
        return ids[:-1] if trims else ids

    def _trimmed(self, text: str, finish: Mapping[str, Any]) -> str:
        """Up to the stop string, where it comes first in the output; text after it goes in any case."""
        matched = finish.get("matched")
        if not isinstance(matched, str) or matched not in text:
            return text
        at = text.index(matched)
        return text[: at + len(matched)] if self._sampling.no_stop_trim else text[:at]


def _whole_words(text: str) -> str:
    """What is told of an unsettled text, which is empty or ends in U+FFFD."""
    if _ideograph(text[-2:-1]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _ideograph(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _IDEOGRAPHS) if character else False
