"""Laws 1 and 5 on prefill/decode pairs: either leg may end in any phase, and the client gets one worker's answer."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from msgspec import Raw

from dyn_relay.formats import catalog
from dyn_relay.formats.sglang.codec import Codec
from dyn_testkit import laws
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.levels import ExchangeLevel
from dyn_testkit.oracle import Oracle
from properties import checks
from properties.prove import for_all, prove
from properties.proxies import OPTIONS, Simulated

ROWS = replace(OPTIONS, routed_experts=True, indexer_topk=True)
ORACLE = Oracle(some.MODEL, routed_experts=True, indexer_topk=True)
NAMES = ("routed_experts", "indexer_topk")
GOALS = (
    *("nothing happens", "another pair", "continued", "continued twice", "dialect changed across a cut"),
    *("prefill ended before it met decode", "prefill ended during the transfer", "prefill ended after the transfer"),
    *("decode ended before it met prefill", "decode ended during the transfer", "decode ended after the transfer"),
    *("logprobs of the prompt", "rows to replay", "rows from a position on", "stream", "unary", "one byte a read"),
)


def asking(body, experts, indexer, start):
    """The same request for rows to replay, those of the experts from a position on."""
    asked = json.loads(body)
    more = {"routed_experts_start_len": min(start, len(asked["input_ids"]))} if start is not None else {}
    rows = {"return_routed_experts": True} | more if experts else {}
    return json.dumps(asked | rows | ({"return_indexer_topk": True} if indexer else {})).encode()


def begin():
    return [replace(case, body=asking(case.body, True, True, 1)) for case in some.hard_pairs()]


def bodies():
    return st.builds(asking, some.bodies(), st.booleans(), st.booleans(), st.none() | st.integers(0, 4))


@pytest.fixture(scope="module")
def exchange():
    return ExchangeLevel(catalog.make("sglang"), ROWS, prefills=ROWS)


@pytest.fixture(scope="module")
def simulated():
    # Workers that die under one request, one after the other, are its fault here as little as anywhere.
    return Simulated(ROWS, prefills=ROWS, suspect_attempts=9)


def test_a_pair_answers_as_one_worker(exchange):
    """Laws 1 and 5, I1: on the exchange alone; the prefill worker's answer comes before decode's, amid it, or after."""
    prove(checks.join(exchange, ORACLE), some.pairs(bodies()), sometimes=GOALS, begin=begin())


def test_a_pair_behind_the_proxy_answers_as_one_worker(simulated):
    """The same through the whole proxy, with every other law that can be seen there."""
    prove(checks.everything_of_pairs(simulated, ORACLE), some.pairs(bodies()), sometimes=GOALS, begin=begin())


def test_rows_are_joined_or_left_out():
    """Law 5 on the codec alone: the prompt's rows are prefill's, the others decode's; what does not fit is no value."""

    def check(rows, spoilt):
        prompt, more, stale, cut = *rows, spoilt
        width = len((prompt + more + stale)[0])
        own, other = b"".join(prompt), b"".join(stale[: len(prompt)]).ljust(len(prompt) * width, b"\xff")
        decode = other + b"".join(more)
        total = len(prompt) + len(more)
        joined = Codec().join("routed_experts", value(own), value(decode), len(prompt), total)
        assert joined is not None
        assert base64.b64decode(json.loads(bytes(joined))) == own + b"".join(more)
        halves = [value(own), value(decode)]
        halves[cut % 2] = value((own, decode)[cut % 2][:-1])
        needed = more or not cut % 2
        found = Codec().join("routed_experts", halves[0], halves[1], len(prompt), total)
        assert (found is None) == bool(needed)
        halves[cut % 2] = None
        found = Codec().join("routed_experts", halves[0], halves[1], len(prompt), total)
        assert (found is None) == bool(needed)

    def row(width):
        return st.binary(min_size=width, max_size=width)

    def some_rows(width):
        return st.tuples(
            st.lists(row(width), min_size=1, max_size=9),
            st.lists(row(width), max_size=9),
            st.lists(row(width), max_size=9),
        )

    for_all(check, st.sampled_from([4, 8, 12, 32]).flatmap(some_rows), st.integers(0, 1))


def value(data):
    return Raw(json.dumps(base64.b64encode(data).decode()).encode())


@pytest.mark.parametrize("spoilt", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["missing", "short", "empty"])
def test_a_part_that_is_missing_or_corrupt_is_left_out(spoilt, how):
    """Law 5: never stale. Everything else is as if nothing had been wrong."""
    bad = {
        "missing": replace(ROWS, routed_experts=False, indexer_topk=False),
        "short": replace(ROWS, packing=lambda rows: rows[:-4]),
        "empty": replace(ROWS, packing=lambda rows: b""),
    }[how]
    whom = {"prefill": (ROWS, bad), "decode": (bad, ROWS)}[spoilt]
    backend = ExchangeLevel(catalog.make("sglang"), whom[0], prefills=whom[1])
    names = NAMES if how == "missing" else ("routed_experts",)
    fields = {"return_routed_experts": True, "return_indexer_topk": True, "return_logprob": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5, "temperature": 0}, **fields}
    for stream in (True, False):
        seen = backend.observe(laws.Case(json.dumps(body | {"stream": stream, "logprob_start_len": 0}).encode()))
        laws.join(seen, ORACLE, names)


def test_a_stale_row_is_seen(exchange):
    """The law would see it: rows of the prompt that are decode's, and legs that were asked for different things."""
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    case = laws.Case(json.dumps(body | {"return_routed_experts": True}).encode())
    seen = exchange.observe(case)
    laws.join(seen, ORACLE)
    stale = json.loads(seen.attempts[0].answer.events()[-2])["meta_info"]["routed_experts"]
    answer = seen.response.json()
    answer["meta_info"]["routed_experts"] = stale
    with pytest.raises(AssertionError, match="routed_experts"):
        laws.join(replace(seen, response=replace(seen.response, body=json.dumps(answer).encode())), ORACLE)
    leg = seen.prefills[0]
    for fields in ({"input_ids": [1, 2]}, {"bootstrap_port": 1}):
        other = replace(leg, body=json.dumps(leg.sent | fields).encode())
        with pytest.raises(AssertionError, match="legs of attempt 0 differ"):
            laws.join(replace(seen, prefills=[other]), ORACLE)
    for room in (0, 2**63, 1.5, True, None, [7, 7]):
        other = replace(seen.attempts[0], body=json.dumps(seen.attempts[0].sent | {"bootstrap_room": room}).encode())
        with pytest.raises(AssertionError, match="no room"):
            laws.join(replace(seen, attempts=[other]), ORACLE)
    with pytest.raises(AssertionError, match="room of an earlier one"):
        laws.join(replace(seen, attempts=seen.attempts * 2), ORACLE)
