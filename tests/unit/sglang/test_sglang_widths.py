"""How wide rows are is learnt from workers that agree: half of the rows are no rows of half the width."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import Raw
from sglang_kit import DONE, SSE_HEAD, Engine, request, sse

from dyn_relay.formats.base import Answer, End
from dyn_relay.formats.sglang.codec import Codec
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.sglang.widths import Widths
from dyn_relay.formats.traits import Pairing, Traits

NAME = "routed_experts"
#: int32 a row.
WIDE = 8
PROMPT = [1, 2, 3]
ANSWER = 6
TRAITS = Traits(model="m", sampling_defaults={}, routed_experts=True, incremental=False)
A, B, C = (replace(TRAITS, epoch=name) for name in "ABC")


def rows(count: int, mark: int = 0, wide: int = WIDE) -> str:
    numbers = [position + mark for position in range(count) for _ in range(wide)]
    return base64.b64encode(b"".join(number.to_bytes(4, "little") for number in numbers)).decode()


def body(tokens: int = ANSWER, **more: Any) -> dict[str, Any]:
    asked = {"rid": "mine", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens}, "stream": True}
    return {**asked, "return_routed_experts": True, **more}


def opened(format: SglangFormat, tokens: int = ANSWER, **more: Any) -> SglangExchange:
    exchange = format.open(request(body(tokens, **more)), "given")
    exchange.admit(TRAITS)
    return exchange


def attempt(
    exchange: SglangExchange, traits: Traits, value: Any, cut: int | None = None, early: bool = False
) -> End | None:
    """The worker tells this value with its finish; `early`: with each event."""
    rid = exchange.rid if not exchange.delivered else f"~{exchange.delivered}"
    sent = json.loads(exchange.dispatch(traits, rid, 1.0).body)
    exchange.head(200, SSE_HEAD)
    found = Engine().events(sent)
    for number in range(len(found) - 1) if early else [len(found) - 2]:
        event = json.loads(found[number][1])
        event["meta_info"][NAME] = value
        found[number] = sse(event)
    for event in found[:cut]:
        exchange.feed([event], 2.0)
    return exchange.end


def whole(format: SglangFormat, traits: Traits, tokens: int, value: str) -> None:
    """An answer without a cut."""
    assert attempt(opened(format, tokens), traits, value) is End.FINISHED


def after_a_cut(format: SglangFormat, traits: Traits, value: Any, **more: Any) -> End | None:
    """What becomes of a continuation whose finish has this value."""
    exchange = opened(format, **more)
    attempt(exchange, A, None, cut=2)
    assert exchange.complete(3.0) is None
    return attempt(exchange, traits, value)


ALL = len(PROMPT) + ANSWER - 1
HALF = rows(ALL // 2)


# -- whose word makes a width sure


def heard(*told: tuple[str | None, int, int]) -> set[int]:
    widths = Widths()
    for worker, count, width in told:
        widths.hear(worker, count, width)
    return widths.sure


def test_two_workers_make_a_width_sure() -> None:
    assert heard(("a", 8, 32), ("b", 9, 32)) == {32}
    assert heard(("a", 8, 32), ("b", 8, 32), ("b", 9, 32)) == {32}


@pytest.mark.parametrize(
    "told",
    [
        [("a", 8, 32), ("a", 9, 32), ("a", 10, 32)],
        [("a", 8, 32), ("b", 8, 32), ("c", 8, 32)],
        [(None, 8, 32), (None, 9, 32)],
        [("a", 8, 32), (None, 9, 32)],
        [("a", 8, 32), ("b", 9, 64)],
        [("a", 0, 0), ("b", 1, 0)],
    ],
    ids=["one worker", "one number of rows", "nobody", "somebody and nobody", "two widths", "no rows"],
)
def test_less_makes_nothing_sure(told: list[tuple[str | None, int, int]]) -> None:
    assert heard(*told) == set()


def test_what_is_sure_grows_by_the_same_rule() -> None:
    """Another model of the same name, say: two of its workers are believed, one is not."""
    told = [("a", 8, 32), ("b", 9, 32)]
    assert heard(*told, ("c", 8, 64), ("c", 9, 64), ("c", 10, 64)) == {32}
    assert heard(*told, ("c", 8, 64), ("d", 9, 64)) == {32, 64}


def test_little_is_kept_of_workers() -> None:
    widths = Widths()
    for number in range(1000):
        widths.hear(f"w{number}", 8, 4 * (number + 1))
        widths.hear("chatty", number + 9, 4 * (number + 2000))
    assert len(widths._heard) <= 64
    assert len(widths._heard["chatty"]) == 2


def test_who_has_been_heard_enough_is_not_read_again() -> None:
    """Each answer that is looked at is decoded."""
    widths = Widths()
    assert not widths.curious(None, 8)
    assert not widths.curious("a", 0)
    assert widths.curious("a", 8)
    widths.hear("a", 8, 32)
    assert [widths.curious("a", 8), widths.curious("a", 9), widths.curious("b", 8)] == [False, True, True]
    widths.hear("a", 9, 32)
    assert not widths.curious("a", 10)
    widths.hear("b", 8, 32)
    assert not widths.curious("c", 10)


# -- continuations


def test_half_of_the_rows_are_refused_once_two_workers_agree() -> None:
    """From answers without a cut, too; what they tell of other models does not count."""
    format = SglangFormat()
    assert after_a_cut(format, C, HALF) is End.FINISHED  # nobody can know
    for traits, tokens in ((A, 4), (B, 5)):
        whole(format, replace(traits, model="another"), tokens, rows(len(PROMPT) + tokens - 1, wide=4))
    whole(format, A, 4, rows(len(PROMPT) + 3))
    assert after_a_cut(format, C, HALF) is End.FINISHED
    whole(format, B, 5, rows(len(PROMPT) + 4))
    assert after_a_cut(format, C, HALF) is End.GARBAGE
    assert after_a_cut(format, C, rows(ALL)) is End.FINISHED


def test_a_worker_that_knows_no_start_is_refused() -> None:
    """It gives all rows where those from a position on were asked for, and the sizes happen to fit."""
    format = SglangFormat()
    assert after_a_cut(format, C, rows(ALL), routed_experts_start_len=4) is End.FINISHED
    for traits, tokens in ((A, 4), (B, 5)):
        whole(format, traits, tokens, rows(len(PROMPT) + tokens - 1))
    assert after_a_cut(format, C, rows(ALL), routed_experts_start_len=4) is End.GARBAGE
    assert after_a_cut(format, C, rows(ALL - 3), routed_experts_start_len=3) is End.FINISHED


def test_one_bad_worker_teaches_nothing() -> None:
    """It gives half of the rows, each time; the others are believed, and it is not."""
    format = SglangFormat()
    for tokens in (2, 4, 6, 8):
        exchange = opened(format, tokens)
        assert attempt(exchange, C, rows((len(PROMPT) + tokens - 1) // 2)) is End.FINISHED
    for _ in range(3):
        assert after_a_cut(format, C, HALF) is End.FINISHED
    assert after_a_cut(format, A, rows(ALL)) is End.FINISHED
    whole(format, B, 5, rows(len(PROMPT) + 4))
    assert after_a_cut(format, C, HALF) is End.GARBAGE
    assert after_a_cut(format, B, rows(ALL)) is End.FINISHED


def test_workers_that_do_not_say_who_they_are_teach_nothing() -> None:
    format = SglangFormat()
    for tokens in (4, 5, 6):
        whole(format, TRAITS, tokens, rows(len(PROMPT) + tokens - 1))
    assert after_a_cut(format, TRAITS, HALF) is End.FINISHED


def test_an_answer_that_is_looked_at_passes_whatever_it_is() -> None:
    format = SglangFormat()
    for value in ("!!!!", {"data": "AAAA"}, None, "", rows(ALL)[:-1]):
        assert attempt(opened(format), A, value) is End.FINISHED


def test_a_refused_attempt_leaves_no_width() -> None:
    """Its rows are whole, but it is refused for something else: good workers are not refused for theirs."""
    exchange = opened(SglangFormat())
    attempt(exchange, A, None, cut=2)
    assert exchange.complete(3.0) is None
    sent = json.loads(exchange.dispatch(B, "~1", 3.0).body)
    exchange.head(200, SSE_HEAD)
    event = json.loads(Engine().events(sent)[-2][1])
    event["meta_info"][NAME] = rows(ALL, wide=WIDE // 2)
    event["output_ids"].pop()
    exchange.feed([sse(event)], 3.0)
    assert (exchange.end, NAME in exchange.detail) == (End.GARBAGE, False)
    assert exchange.complete(3.0) is None
    assert attempt(exchange, C, rows(ALL)) is End.FINISHED


def test_rows_that_were_told_early_have_the_width_that_is_known() -> None:
    """Half of them, told before a cut, are the client's already: the failure names the field."""
    format = SglangFormat()
    for traits, tokens in ((A, 4), (B, 5)):
        whole(format, traits, tokens, rows(len(PROMPT) + tokens - 1))
    exchange = opened(format)
    attempt(exchange, C, rows(2), cut=2, early=True)
    with pytest.raises(Exception, match=NAME):
        exchange.complete(3.0)


@pytest.mark.parametrize("stream", [True, False])
def test_null_is_no_rows_yet(stream: bool) -> None:
    """Also in the events of a continuation."""
    exchange = opened(SglangFormat(), stream=stream)
    attempt(exchange, A, None, cut=2, early=True)
    assert exchange.complete(3.0) is None
    attempt(exchange, B, None, cut=2, early=True)
    assert exchange.complete(3.0) is None
    assert exchange.delivered == 4
    assert attempt(exchange, C, None) is End.GARBAGE
    assert exchange.detail == f"a finish without {NAME}"
    assert exchange.complete(3.0) is None
    assert attempt(exchange, A, rows(ALL)) is End.FINISHED


# -- two workers of one attempt


def value(text: str) -> Raw:
    return Raw(json.dumps(text).encode())


def known(*widths: int) -> Widths:
    found = Widths()
    for width in widths:
        found.agree(width)
    return found


def test_two_legs_that_agree_are_believed() -> None:
    """They are two workers, and give different numbers of rows; whatever was known before."""
    widths = known(4)
    assert Codec().join(NAME, value(rows(3)), value(rows(8)), 3, 8, widths) is not None
    assert widths.sure == {4, 4 * WIDE}


@pytest.mark.parametrize("spoilt", ["prefill", "decode"])
def test_two_legs_that_do_not_teach_nothing(spoilt: str) -> None:
    counts = {"prefill": (2, 8), "decode": (4, 4)}[spoilt]
    widths = Widths()
    assert Codec().join(NAME, value(rows(counts[0])), value(rows(counts[1])), 4, 8, widths) is None
    assert widths.sure == set()


def test_one_token_is_compared_with_decodes_rows() -> None:
    """Two of four rows; decode gives none of the answer's, but has as many, and as wide."""
    codec, half, good = Codec(), value(rows(2)), value(rows(4))
    assert codec.join(NAME, half, good, 4, 4) is None
    assert codec.join(NAME, good, half, 4, 4) is None
    assert codec.join(NAME, good, value(rows(4, mark=64)), 4, 4) is good
    assert codec.join(NAME, half, value("no rows"), 4, 4) is half  # nobody can know
    widths = Widths()
    codec.join(NAME, good, good, 4, 4, widths)
    assert widths.sure == set()  # both may have the same wrong number of them


def test_no_token_is_compared_with_decodes_rows() -> None:
    assert Codec().join(NAME, value(rows(2)), value(rows(3)), 4, 3) is None
    assert Codec().join(NAME, value(rows(4)), value(rows(3, mark=64)), 4, 3) is not None


def test_one_token_is_compared_with_what_is_known() -> None:
    """Rows that decode has as wide are taken all the same: two workers against a memory."""
    codec, half, good = Codec(), value(rows(2)), value(rows(4))
    for decode in (None, value("no rows"), good):
        assert codec.join(NAME, half, decode, 4, 4, known(4 * WIDE)) is None
    assert codec.join(NAME, good, half, 4, 4, known(4 * WIDE)) is good
    assert codec.join(NAME, half, half, 4, 4, known(4 * WIDE)) is half


def test_decodes_rows_alone_are_compared_with_what_is_known() -> None:
    half, good = value(rows(2)), value(rows(4))
    assert Codec().join(NAME, None, half, 0, 4) is half  # nobody can know
    assert Codec().join(NAME, None, half, 0, 4, known(4 * WIDE)) is None
    assert Codec().join(NAME, None, good, 0, 4, known(4 * WIDE)) is good
    assert Codec().join(NAME, None, value(""), 0, 0, known(4 * WIDE)) is not None


def pair(format: SglangFormat, decode: str, prefill: str, tokens: int) -> bytes:
    """The stream of a pair that tells these rows."""
    exchange = opened(format, tokens)
    rooms = iter(range(1, 9))
    sent = json.loads(
        exchange.dispatch(A, "mine", 1.0, pairing=Pairing(B, "p", 1, None, lambda: next(rooms), lambda room: True)).body
    )
    exchange.head(200, SSE_HEAD)
    finish = json.loads(Engine(chunks=(tokens,)).events(sent)[0][1])
    first = json.loads(Engine().events(sent)[0][1])
    first["meta_info"] |= {"finish_reason": {"type": "length", "length": 0}, NAME: prefill}
    finish["meta_info"][NAME] = decode
    out = exchange.feed([sse(finish), DONE], 2.0)
    out += exchange.prefilled(Answer(200, json.dumps(first).encode()), None, 2.0)
    assert exchange.end is End.FINISHED, exchange.detail
    return out


def test_pairs_teach_and_are_taught() -> None:
    """Through the exchange: what pairs agree on counts for an answer of one token, and for continuations elsewhere."""
    format = SglangFormat()
    half, good = rows(1), rows(len(PROMPT))
    wider = base64.b64encode(base64.b64decode(half) * len(PROMPT)).decode()
    assert NAME.encode() in pair(format, "", wider, 1)
    joined = pair(format, rows(ALL, 64), good, ANSWER)
    assert base64.b64decode(json.loads(joined.split(b"\n\n")[0][6:])["meta_info"][NAME])[: 4 * WIDE] == bytes(4 * WIDE)
    assert good.encode() in pair(format, "", good, 1)
    assert NAME.encode() not in pair(format, "", rows(len(PROMPT) * 2), 1)
    assert after_a_cut(format, C, HALF) is End.GARBAGE


def test_a_pairs_answer_is_not_its_decode_workers_word() -> None:
    """Of one token: the rows are the prefill worker's."""
    format = SglangFormat()
    pair(format, "", rows(len(PROMPT)), 1)
    whole(format, B, 5, rows(len(PROMPT) + 4))
    assert after_a_cut(format, C, HALF) is End.FINISHED
