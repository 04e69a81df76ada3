"""Tokenizers without a model file: what ids spell, and ids for a text.

Decoding is that of the fast tokenizers of Hugging Face (`tokenizers` 0.23: the decoders `ByteLevel`, and `Replace`,
`ByteFallback`, `Fuse`, `Strip` in this order), which stock SGLang 0.5.23 asks. Encoding is not theirs: the longest
piece always wins, which is enough for ids that decode to the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import AnyStr, Generic, Protocol

#: What stands for a byte that is in no character.
REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What an engine needs of a tokenizer."""

    @property
    def size(self) -> int | None:
        """Ids are below it; None: any number is an id."""
        ...

    @property
    def specials(self) -> frozenset[int]:
        """Ids of control tokens: EOS, turns of a chat."""
        ...

    @property
    def prefix(self) -> tuple[int, ...]:
        """What comes before the ids of a prompt that is given as text (BOS)."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the prefix."""
        ...

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of some ids; those beyond the vocabulary have none.

        No tokenizer of transformers 5.19 reads `spaces_between_special_tokens`, and none here does. Raises
        `OverflowError` for what is no unsigned 32-bit number, if there is a vocabulary.
        """
        ...


@dataclass(frozen=True, slots=True)
class ByteWords:
    """Every number is an id: a single byte below 256, so that characters can be split, and the word `<n>` above."""

    size: None = None
    specials: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of some ids; nothing is special."""
        return b"".join(map(_byte_or_word, ids)).decode(errors="replace")


def _byte_or_word(token: int) -> bytes:
    return bytes((token,)) if 0 <= token < 256 else b"<%d>" % token


@dataclass(frozen=True)
class _Vocabulary(Generic[AnyStr]):
    """Special tokens have the first ids; pieces come after them."""

    special: tuple[str, ...] = field(repr=False)
    pieces: tuple[AnyStr, ...] = field(repr=False)
    prefix: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Special tokens and pieces."""
        return len(self.special) + len(self.pieces)

    @cached_property
    def specials(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(range(len(self.special)))

    @cached_property
    def _ids(self) -> dict[AnyStr, int]:
        return {piece: at for at, piece in enumerate(self.pieces, len(self.special))}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.pieces))

    def _piece(self, rest: AnyStr) -> AnyStr | None:
        """The longest piece that a text begins with."""
        tries = (rest[:length] for length in range(min(len(rest), self._longest), 0, -1))
        return next((piece for piece in tries if piece in self._ids), None)

    @cached_property
    def _cuts(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, self.special))})")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens in it included."""
        ids: list[int] = []
        for at, part in enumerate(self._cuts.split(text)):
            ids += [self.special.index(part)] if part in self.special else self._encode(part, at == 0)
        return ids

    def _encode(self, text: str, first: bool) -> Iterator[int]:
        """Ids of a text without special tokens; `first`: it begins the whole text."""
        raise NotImplementedError

    def _known(self, ids: Sequence[int], skip_special_tokens: bool) -> Iterator[int]:
        """The ids that spell something. Raises `OverflowError`."""
        for token in ids:
            if not 0 <= token < 1 << 32:
                raise OverflowError(f"number too {'small' if token < 0 else 'large'} to fit in target type")
            if token < self.size and not (skip_special_tokens and token in self.specials):
                yield token


class ByteLevel(_Vocabulary[bytes]):
    """Pieces are bytes, as with GPT-2, Llama 3 and Qwen: a piece may hold a part of a character, or of two.

    Every single byte must be a piece. Bytes that are in no character decode to one U+FFFD for each maximal part of one.
    """

    @cached_property
    def _spelled(self) -> tuple[bytes, ...]:
        return (*(token.encode() for token in self.special), *self.pieces)

    def _encode(self, text: str, first: bool) -> Iterator[int]:
        data = text.encode()
        while piece := self._piece(data):
            yield self._ids[piece]
            data = data[len(piece) :]

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of some ids. Raises `OverflowError`."""
        known = self._known(ids, skip_special_tokens)
        return b"".join(self._spelled[token] for token in known).decode(errors="replace")


#: A space within a piece of a `SentencePiece`.
SPACE = "\u2581"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class SentencePiece(_Vocabulary[str]):
    """Pieces are text with `SPACE` for spaces, and `<0xE2>` for bytes of rare characters, as with Llama 2 and Mistral.

    All 256 bytes must be pieces. The text of some ids loses one leading space, so it is not the sum of the texts of its
    parts. Bytes in a row that are not whole characters, all of them, decode to one U+FFFD each.
    """

    @cached_property
    def _spelled(self) -> tuple[str, ...]:
        return self.special + self.pieces

    def _encode(self, text: str, first: bool) -> Iterator[int]:
        """Ids of a text; a space is put before it, which decoding takes away."""
        rest = (SPACE if first and text else "") + text.replace(" ", SPACE)
        while rest:
            piece = self._piece(rest)
            if piece is None or _BYTE.fullmatch(piece):
                piece = rest[0]
                yield from (self._ids[f"<0x{byte:02X}>"] for byte in piece.encode())
            else:
                yield self._ids[piece]
            rest = rest[len(piece) :]

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of some ids. Raises `OverflowError`."""
        text: list[str] = []
        run = bytearray()
        for token in self._known(ids, skip_special_tokens):
            piece = self._spelled[token]
            byte = _BYTE.fullmatch(piece)
            if byte is not None:
                run += bytes.fromhex(byte[1])
                continue
            text += _characters(run), piece.replace(SPACE, " ")
            run.clear()
        text.append(_characters(run))
        return "".join(text).removeprefix(" ")


def _characters(run: bytearray) -> str:
    """The text of byte tokens in a row: whole characters, or nothing that can be read."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)


def _single_bytes(listed: Sequence[bytes]) -> tuple[bytes, ...]:
    """The bytes that are not pieces yet."""
    return tuple(bytes((byte,)) for byte in range(256) if bytes((byte,)) not in listed)


#: Characters in parts: emoji (whole, joined by U+200D, flags), accents, Hangul in one and in jamo, Chinese, U+FFFD.
_PARTS = (
    *(b"\xf0", b"\x9f", b"\xf0\x9f", b"\x98\x80", b"\xf0\x9f\x91", b"\x91\xa9", b"\xa8", b"\xe2\x80\x8d", b"\xe2\x80"),
    *(b"\x8d", b"\x8d\xf0\x9f", b"\xef\xb8\x8f", b"\xf0\x9f\x87", b"\xaa\xf0", b"\x87\xa9", b"\x87\xaa", b"\xc3"),
    *(b"\xa9", b"\xc3\xa9", b"e", b"\xcc", b"\x81", b"\xcc\x81", b"\xed\x95\x9c", b"\xed\x95", b"\x9c", b"\xe1\x84"),
    *(b"\x92", b"\xe1\x85\xa1", b"\xe1", b"\x86\xab", b"\xe4\xb8\xad", b"\xe4\xb8", b"\xad", b"\xad\xe6", b"\x96\x87"),
    *("中文".encode(), b"\xf0\xa0", b"\x80\x80", b"\xe2\x82", b"\xac", b"\xef\xbf\xbd", b"\xff"),
)
_WORDS = (
    *(b" ", b"  ", b" the", b" a", b"Hello", b" world", b",", b".", b"\n", b"\n\n", b" \n", b"\r\n", b"\t", b"ab"),
    *(b"STO", b"OP", b"P\n", b" <", b"|>"),
)
_CHATS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SENTENCES = ("<unk>", "<s>", "</s>")
_BYTE_TOKENS = (0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x8D, 0xC3, 0xA9, 0xE4, 0xB8, 0xAD, 0x0A)
_TEXTS = (
    *(SPACE, SPACE * 2, SPACE + "the", SPACE + "a", "Hello", SPACE + "Hello", "world", ",", ".", SPACE + "é", "e"),
    *("\u0301", "\u200d", "👩", "👨", "한", "ᄒ", "ᅡ", "ᆫ", "中", "文", "ab", "STO", "OP", SPACE + "<", REPLACEMENT),
)

PLAIN = ByteWords()
#: The hard ones come first: a model with 65 ids here, and 41 with `SENTENCE_PIECE`, says nothing else.
BYTE_LEVEL = ByteLevel(_CHATS, _PARTS + _WORDS + _single_bytes(_PARTS + _WORDS))
SENTENCE_PIECE = SentencePiece(
    _SENTENCES,
    (
        *(f"<0x{byte:02X}>" for byte in _BYTE_TOKENS),
        *_TEXTS,
        *(f"<0x{byte:02X}>" for byte in range(256) if byte not in _BYTE_TOKENS),
    ),
    prefix=(_SENTENCES.index("<s>"),),
)
#: By the name that options have for them.
TOKENIZERS: dict[str, Tokenizer] = {"plain": PLAIN, "byte-level": BYTE_LEVEL, "sentencepiece": SENTENCE_PIECE}
