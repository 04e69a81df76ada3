"""Text that is told piece by piece, and stop strings. SGLang's own detokenizer gave the same for the same pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hard_texts import HARD, KINDS, piece
from hypothesis import given
from hypothesis import strategies as st

from dyn_testkit.detokenizer import Detokenizer
from dyn_testkit.engine import Sampling
from dyn_testkit.stops import StopStrings
from dyn_testkit.tokenizer import BYTE_LEVEL, PLAIN, SENTENCE_PIECE, SPACE, Tokenizer

LENGTH = {"type": "length", "length": 1}
DEFAULTS = Sampling()


def tell(
    tokenizer: Tokenizer,
    prompt: list[int],
    *parts: list[int],
    finish: dict[str, Any] | None = LENGTH,
    sampling: Sampling = DEFAULTS,
) -> list[str]:
    """The text told after each part; `finish` comes with the last."""
    detokenizer = Detokenizer(tokenizer, prompt, sampling)
    return [detokenizer.push(part, finish if at == len(parts) else None) for at, part in enumerate(parts, 1)]


def ids_of(kind: str, text: str) -> tuple[list[int], list[int]]:
    """A prompt, and the ids of a text that follows it."""
    tokenizer = KINDS[kind]
    prompt, both = tokenizer.encode("ab"), tokenizer.encode("ab" + text)
    assert both[: len(prompt)] == prompt
    return prompt, both[len(prompt) :]


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("kind", KINDS)
def test_hard_texts_in_two_parts(kind: str, name: str) -> None:
    """Wherever it is cut: nothing is lost, nothing told twice, and nothing told that is not there."""
    prompt, ids = ids_of(kind, HARD[name])
    for cut in range(len(ids) + 1):
        first, second = tell(KINDS[kind], prompt, ids[:cut], ids[cut:])
        assert first + second == HARD[name]


@given(st.sampled_from([*KINDS]), st.sampled_from([*HARD]), st.sets(st.integers(1, 40)))
def test_hard_texts_in_many_parts(kind: str, name: str, cuts: set[int]) -> None:
    prompt, ids = ids_of(kind, HARD[name])
    ends = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    parts = [ids[start:end] for start, end in pairwise(ends)]
    assert "".join(tell(KINDS[kind], prompt, *parts)) == HARD[name]


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ((b"\xf0\x9f", b"\x98\x80"), ["", "😀"]),
        ((b"\xe2", b"\x82", b"\xac", b"a"), ["", "", "€", "a"]),
        ((b"ab", b"\xf0\x9f", b"\x98\x80", b"\n"), ["ab", "", "😀", "\n"]),
        # Of what is not whole yet: up to the last space, the last line or the last Chinese character.
        ((b"\xf0", b" the", b"ab", b"\xf0"), ["", "\ufffd the", "ab", "\ufffd"]),
        ((b" the a\xe2", b"\x82\xac"), [" the ", "a€"]),
        ((b" the\xe2", b"\x82\xac"), [" ", "the€"]),
        ((b"ab\n\xe2", b"\xff"), ["", "ab\n\ufffd\ufffd"]),
        (("中".encode() + b"\xe6", b"\x96\x87"), ["中", "文"]),
        (("한".encode() + b"\xe6", b"\x96\x87"), ["", "한文"]),
        # U+FFFD itself is taken for a part of a character.
        (("\ufffd".encode(), b"a"), ["", "\ufffda"]),
        # What never becomes a character is told in the end.
        ((b"a", b"\xf0\x9f"), ["a", "\ufffd"]),
    ],
)
def test_what_is_withheld(pieces: tuple[bytes, ...], told: list[str]) -> None:
    parts = [[piece(bytes((byte,))) for byte in data] for data in pieces]
    assert tell(BYTE_LEVEL, [piece(b"a")], *parts) == told


def test_the_context_is_five_tokens_of_the_prompt() -> None:
    """What is before them is not looked at: a character that began there is lost."""
    half, rest = [piece(b"\xf0"), piece(b"\x9f"), piece(b"\x98")], [piece(b"\x80")]
    assert tell(BYTE_LEVEL, [*half, *rest], [piece(b"a")]) == ["a"]
    assert tell(BYTE_LEVEL, half, rest) == [""]
    assert tell(BYTE_LEVEL, [*half, *map(piece, (b"a", b"b", b"c"))], rest) == ["\ufffd"]
    run = [piece(f"<0x{byte:02X}>") for byte in "😀é".encode()]
    assert tell(SENTENCE_PIECE, run[:-1], run[-1:]) == [""]
    assert tell(SENTENCE_PIECE, [piece("<0xFF>"), *run[:-1]], run[-1:]) == [""]
    assert tell(SENTENCE_PIECE, run[1:-1], run[-1:]) == ["\ufffd"]


def test_what_came_before_the_context() -> None:
    """A space is kept if something was told before it. Skipped special tokens are nothing."""
    space = [piece(SPACE + "the")]
    assert tell(SENTENCE_PIECE, [piece("e")], space) == [" the"]
    assert tell(SENTENCE_PIECE, [*SENTENCE_PIECE.prefix], space) == ["the"]
    keep = Sampling(skip_special_tokens=False)
    assert tell(SENTENCE_PIECE, [*SENTENCE_PIECE.prefix], space, sampling=keep) == [" the"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_is_a_longer_prompt(kind: str) -> None:
    """Texts of two attempts add up to the whole if, and only if, the first one had told all of its tokens."""
    tokenizer = KINDS[kind]
    prompt, ids = ids_of(kind, "a 😀中文 the")
    whole = "".join(tell(tokenizer, prompt, ids))
    right = []
    for cut in range(1, len(ids)):
        before = "".join(tell(tokenizer, prompt, *([token] for token in ids[:cut]), finish=None))
        after = "".join(tell(tokenizer, prompt + ids[:cut], *([token] for token in ids[cut:])))
        right.append(before + after == whole)
        assert right[-1] == (before == tokenizer.decode(prompt + ids[:cut])[2:])
    assert len(set(right)) == 2


def test_a_character_is_lost_between_two_attempts() -> None:
    prompt, ids = ids_of("byte-level", "a😀b")
    assert ids == [*map(piece, (b"a", b"\xf0\x9f", b"\x98\x80", b"b"))]
    assert tell(BYTE_LEVEL, prompt, ids[:2], finish=None) + tell(BYTE_LEVEL, prompt + ids[:2], ids[2:]) == ["", "b"]


def test_text_that_is_settled_stays() -> None:
    """A bad byte spoils those of the last settled text, which is decoded with it, and none before them."""
    parts = [[piece(f"<0x{byte:02X}>") for byte in data] for data in ("中".encode(), "é".encode(), b"\xff")]
    assert tell(SENTENCE_PIECE, [piece("e")], *parts) == ["中", "é", "\ufffd\ufffd"]
    assert tell(SENTENCE_PIECE, [piece("e")], parts[0] + parts[1], parts[2]) == ["中é", "\ufffd" * 4]


def test_special_tokens_are_skipped_or_not() -> None:
    ids = [piece(b"ab"), 2, piece(b" a")]
    assert tell(BYTE_LEVEL, [5], *([token] for token in ids)) == ["ab", "", " a"]
    assert "".join(tell(BYTE_LEVEL, [5], ids, sampling=Sampling(skip_special_tokens=False))) == "ab<|im_end|> a"


def test_ids_beyond_the_vocabulary_count_as_the_first_one() -> None:
    """A model may have more ids than its tokenizer has."""
    shown = Sampling(skip_special_tokens=False)
    assert tell(BYTE_LEVEL, [5], [BYTE_LEVEL.size], sampling=shown) == ["<|endoftext|>"]
    assert tell(PLAIN, [5], [100000]) == ["<100000>"]


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "a "), (True, "a STOP")])
def test_stop_strings_are_trimmed_where_they_come_first(no_stop_trim: bool, text: str) -> None:
    """Wherever it is cut; but what was told is told, as of a unary request, for which no stop string is waited for."""
    ids = PLAIN.encode("a STOPSTOP")
    sampling = Sampling(no_stop_trim=no_stop_trim)
    for cut in range(len(ids)):
        first, second = tell(
            PLAIN, [5], ids[:cut], ids[cut:], finish={"type": "stop", "matched": "STOP"}, sampling=sampling
        )
        assert first + second == (text if cut <= len(text) else "a STOPSTOP"[:cut])


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "a"), (True, "ab")])
def test_stop_tokens_are_trimmed(no_stop_trim: bool, text: str) -> None:
    finish = {"type": "stop", "matched": ord("b")}
    assert tell(PLAIN, [5], [97, 98], finish=finish, sampling=Sampling(no_stop_trim=no_stop_trim)) == [text]
    assert tell(PLAIN, [5], [97], [98], finish=finish, sampling=Sampling(no_stop_trim=no_stop_trim)) == ["a", text[1:]]


def test_a_stop_token_that_is_the_end_of_a_character() -> None:
    """The character is gone with it."""
    end = piece(b"\x98\x80")
    parts = [[piece(b"a"), piece(b"\xf0\x9f")], [end]]
    assert tell(BYTE_LEVEL, [5], *parts, finish={"type": "stop", "matched": end}) == ["", "a\ufffd"]


def test_a_stop_that_is_not_in_the_text_trims_nothing() -> None:
    """It is looked for with special tokens, which the text is without."""
    assert StopStrings(("<|im_end|>",), BYTE_LEVEL).found([piece(b"a"), 2]) == ("<|im_end|>", 2)
    finish = {"type": "stop", "matched": "<|im_end|>"}
    assert tell(BYTE_LEVEL, [5], [piece(b"a"), 2], finish=finish) == ["a"]
    shown = Sampling(skip_special_tokens=False)
    assert tell(BYTE_LEVEL, [5], [piece(b"a"), 2, piece(b"a")], finish=finish, sampling=shown) == ["a"]


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_are_found_at_their_last_token(kind: str) -> None:
    tokenizer = KINDS[kind]
    for stop in ("😀", "中文", "STOP\n", "e\u0301"):
        _, ids = ids_of(kind, "a " + stop + " the")
        strings = StopStrings((stop,), tokenizer)
        found = [strings.found(ids[:end]) for end in range(1, len(ids) + 1)]
        first = next(end for end in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:end]))
        assert found[: first - 1] == [None] * (first - 1)
        assert found[first - 1] == (stop, first)
        # Of tokens that came in one pass, those after it do not count.
        assert strings.found(ids, len(ids)) == (stop, first)


def test_stop_strings_in_more_tokens_than_they_encode_to() -> None:
    """The window is one token longer than the longest stop string; spelled in more, a stop string is not found."""
    stop = "STOP"
    assert BYTE_LEVEL.encode(stop) == [piece(b"STO"), piece(b"P")]
    assert StopStrings((stop,), BYTE_LEVEL).found([*map(piece, (b"S", b"T", b"OP"))]) == (stop, 3)
    assert StopStrings((stop,), BYTE_LEVEL).found([*map(piece, (b"S", b"T", b"O", b"P"))]) is None
    assert StopStrings((stop, "abc\n\n\n"), BYTE_LEVEL).found([*map(piece, (b"S", b"T", b"O", b"P"))]) == (stop, 4)
    assert StopStrings((stop,), BYTE_LEVEL).found([*map(piece, (b"S", b"T", b"O", b"P"))], 2) == (stop, 4)


@pytest.mark.parametrize(
    ("output", "begun"),
    [("a", False), ("aS", True), ("aST", True), ("aSTOP", True), ("aSTOPa", True), ("aSTOPab", False), ("Sa", False)],
)
def test_what_a_stream_waits_for(output: str, begun: bool) -> None:
    assert StopStrings(("", "xyz", "STOP"), PLAIN).begun(PLAIN.encode(output)) is begun
    assert not StopStrings((), PLAIN).begun(PLAIN.encode(output))
