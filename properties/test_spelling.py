"""A format whose rows are no Base64: the laws of the native one, asked of workers that spell as it does."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import msgspec
import pytest
from hypothesis import strategies as st
from msgspec import Raw

from dyn_relay.formats.sglang.codec import STRIDE, Codec
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_testkit import laws
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.levels import ExchangeLevel
from dyn_testkit.oracle import Oracle
from properties.prove import prove
from properties.proxies import OPTIONS
from properties.test_pairs import asking

ORACLE = Oracle(some.MODEL, routed_experts=True)
SPELT = replace(OPTIONS, routed_experts=True, spelling=bytes.hex)
_VALUE = re.compile(rb'("routed_experts": ?")([^"]*)"')


class Hex(Codec):
    """Two digits a byte."""

    def decode(self, name, value):
        try:
            text = msgspec.json.decode(value, type=str)
        except msgspec.DecodeError as exc:
            raise ValueError(f"{name}: {exc}") from exc
        for at in range(0, len(text), STRIDE):
            yield bytes.fromhex(text[at : at + STRIDE])

    def encode(self, name, data):
        return Raw(json.dumps(data.hex()).encode())


class SglangHex(SglangFormat):
    name = "sglang-hex"
    codec = Hex()


def native(seen):
    """With the rows as a native worker spells them."""

    def spelt(match):
        return match[1] + base64.b64encode(bytes.fromhex(match[2].decode())) + b'"'

    return replace(seen, response=replace(seen.response, body=_VALUE.sub(spelt, seen.response.body)))


def bodies():
    return st.builds(asking, some.bodies(), st.just(True), st.just(False), st.none() | st.integers(0, 4))


def test_equivalence():
    """Law 1."""
    level = ExchangeLevel(SglangHex(), SPELT)

    def check(case):
        seen = level.observe(case)
        laws.equivalence(native(seen), ORACLE)
        return seen

    goals = ("nothing happens", "continued", "continued twice", "rows from a position on", "stream", "unary")
    prove(check, some.cases(bodies()), sometimes=goals, begin=())


def test_a_pair_answers_as_one_worker():
    """Laws 1 and 5."""
    level = ExchangeLevel(SglangHex(), SPELT, prefills=SPELT)

    def check(case):
        seen = level.observe(case)
        laws.join(native(seen), ORACLE)
        return seen

    goals = ("nothing happens", "continued", "another pair", "rows from a position on", "stream", "unary")
    prove(check, some.pairs(bodies()), sometimes=goals, begin=())


def test_the_other_spelling_is_none():
    """Nothing passes because nobody looked."""
    case = laws.Case(asking(b'{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}}', True, False, None))
    workers = replace(SPELT, spelling=OPTIONS.spelling)
    laws.join(ExchangeLevel(SglangHex(), workers, prefills=workers).observe(case), ORACLE, ["routed_experts"])
    with pytest.raises(AssertionError, match="routed_experts"):
        laws.join(ExchangeLevel(SglangHex(), SPELT, prefills=SPELT).observe(case), ORACLE)
