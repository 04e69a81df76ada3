"""Texts that are hard to cut."""

from __future__ import annotations

from dyn_testkit.tokenizer import BYTE_LEVEL, PLAIN, SENTENCE_PIECE, Tokenizer

#: Characters of one to four bytes; joined, variant and flag emoji; accents; Hangul in one and in jamo; Chinese.
HARD = {
    "two, three and four bytes": "é€😀",
    "joined": "👩\u200d👨\u200d👩 ok",
    "variant": "a\ufe0f b\ufe0f",
    "flags": "🇩🇪🇪🇪",
    "accent after its letter": "cafe\u0301 e\u0301",
    "Hangul": "한 한한",
    "jamo": "\u1112\u1161\u11ab \u1112\u1161",
    "Chinese": "中文中 𠀀文",
    "lines": "Hello\n\n \n\tab\r\n",
    "spaces": "  the  a the",
    "words": "Hello the world, ab.",
    "no byte token": "<0xE4>",
    "replacement": "a\ufffdb c",
}
KINDS: dict[str, Tokenizer] = {"plain": PLAIN, "byte-level": BYTE_LEVEL, "sentencepiece": SENTENCE_PIECE}


def piece(text: str | bytes) -> int:
    """The id of this piece, whatever encoding would make of it: bytes of `BYTE_LEVEL`, text of `SENTENCE_PIECE`."""
    if isinstance(text, bytes):
        return len(BYTE_LEVEL.special) + BYTE_LEVEL.pieces.index(text)
    return len(SENTENCE_PIECE.special) + SENTENCE_PIECE.pieces.index(text)
