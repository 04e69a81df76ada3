"""Tokenizers of the testkit. What is expected here was seen with `tokenizers` 0.23.3 and the same vocabularies."""

from __future__ import annotations

import pytest
from hard_texts import HARD, KINDS, piece
from hypothesis import given
from hypothesis import strategies as st

from dyn_testkit.tokenizer import BYTE_LEVEL, PLAIN, SENTENCE_PIECE, SPACE

TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters=SPACE)) | st.sampled_from([*HARD.values()])


@given(TEXTS, st.sampled_from([*KINDS]))
def test_ids_of_a_text_are_that_text(text: str, kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.size is None or all(0 <= token < tokenizer.size for token in ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_ids_of_a_vocabulary_are_distinct(kind: str) -> None:
    tokenizer = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCE_PIECE}[kind]
    assert len({*tokenizer.special, *tokenizer.pieces}) == tokenizer.size


def test_hard_characters_are_in_parts() -> None:
    """No hard text is a row of whole characters."""
    for name in ("two, three and four bytes", "joined", "flags", "jamo", "Chinese"):
        ids = BYTE_LEVEL.encode(HARD[name])
        assert any("\ufffd" in BYTE_LEVEL.decode([token]) for token in ids), name
    assert len(BYTE_LEVEL.encode("👩\u200d👨")) > 3
    assert BYTE_LEVEL.encode(" the a") == [piece(b" the"), piece(b" a")]
    assert SENTENCE_PIECE.encode("😀") == [piece(SPACE), *map(piece, ("<0xF0>", "<0x9F>", "<0x98>", "<0x80>"))]
    assert PLAIN.decode([97, 0xC3, 0xA9, 300]) == "aé<300>"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        # One U+FFFD for the longest beginning of a character, or for a byte that begins none.
        ((b"\xf0\x9f",), "\ufffd"),
        ((b"\xf0\x9f", b"a"), "\ufffda"),
        ((b"\xf0", b"\xf0\x9f", b"\x98\x80"), "\ufffd😀"),
        ((b"\x98\x80",), "\ufffd\ufffd"),
        ((b"\xe4\xb8", b"\xff", b"\xc3\xa9"), "\ufffd\ufffdé"),
        ((b"\xed", b"\xa0", b"\x80"), "\ufffd\ufffd\ufffd"),
        # A piece with the end of one character and the beginning of the next.
        ((b"\xe4\xb8", b"\xad\xe6", b"\x96\x87"), "中文"),
    ],
)
def test_bytes_in_no_character(pieces: tuple[bytes, ...], text: str) -> None:
    assert BYTE_LEVEL.decode([*map(piece, pieces)]) == text


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (("<0xE4>", "<0xB8>", "<0xAD>"), "中"),
        # One bad byte spoils the good ones before it, up to the next piece of text.
        (("<0xE4>", "<0xB8>", "<0xAD>", "<0xF0>", "<0x9F>"), "\ufffd" * 5),
        (("<0xC3>", "<0xA9>", "e", "<0xF0>"), "ée\ufffd"),
        # The first space goes, one only, and wherever it comes from.
        ((SPACE + "Hello", SPACE + "the"), "Hello the"),
        ((SPACE * 2, "e"), " e"),
        (("<0x20>", "e"), "e"),
        (("e", SPACE + "é"), "e é"),
    ],
)
def test_sentencepiece(pieces: tuple[str, ...], text: str) -> None:
    assert SENTENCE_PIECE.decode([*map(piece, pieces)]) == text


def test_texts_of_parts_do_not_add_up() -> None:
    first, second = SENTENCE_PIECE.encode("Hello"), [piece(SPACE + "the")]
    assert SENTENCE_PIECE.decode(first + second) == "Hello the"
    assert SENTENCE_PIECE.decode(first) + SENTENCE_PIECE.decode(second) == "Hellothe"


def test_special_tokens() -> None:
    """They are found in texts, and skipped if that is asked for; a skipped one does not keep the space after it."""
    ids = BYTE_LEVEL.encode("ab<|im_end|> a")
    assert ids == [piece(b"ab"), 2, piece(b" a")]
    assert BYTE_LEVEL.decode(ids) == "ab<|im_end|> a"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=True) == "ab a"
    turn = [*SENTENCE_PIECE.prefix, piece(SPACE + "Hello")]
    assert SENTENCE_PIECE.decode(turn) == "<s> Hello"
    assert SENTENCE_PIECE.decode(turn, skip_special_tokens=True) == "Hello"
    for flag in (False, True):
        assert BYTE_LEVEL.decode([2, 2], spaces_between_special_tokens=flag) == "<|im_end|><|im_end|>"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE])
def test_ids_outside_the_vocabulary(tokenizer: type[BYTE_LEVEL]) -> None:
    assert tokenizer.decode([tokenizer.size, 1 << 31]) == ""
    with pytest.raises(OverflowError, match="too small"):
        tokenizer.decode([-1])
    with pytest.raises(OverflowError, match="too large"):
        tokenizer.decode([1 << 32])
