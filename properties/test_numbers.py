"""Arithmetic that answers depend on: rows in Base64, counters after a cut, budgets that saturate."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import strategies as st

from dyn_relay.formats import catalog
from dyn_relay.formats.base import NativeRequest
from dyn_relay.formats.sglang.continuation import remaining
from dyn_relay.formats.traits import Traits
from dyn_testkit import laws
from properties.prove import for_all

HEADERS = [(b"content-type", b"application/json")]
#: A worker that says how it streams: no event has to wait until that shows.
CUMULATIVE = Traits(incremental=False)


def test_rows_in_base64_survive_a_cut():
    """Rows of any width, cut at any row, are themselves again once joined; half a row is refused."""
    rows = st.integers(1, 9).flatmap(lambda width: st.lists(st.binary(min_size=width, max_size=width), max_size=9))

    def check(rows, at):
        laws.rows_survive(rows, min(at, len(rows)))
        width = len(rows[0]) if rows else 1
        half = base64.b64encode(b"".join(rows)[:-1]).decode()
        if width > 1:
            with pytest.raises(ValueError, match="no whole rows"):
                laws.split_rows(half, width, 0)
            with pytest.raises(ValueError, match="no whole rows"):
                laws.join_rows([half], width)

    for_all(check, rows, st.integers(0, 9))


def test_budgets_saturate():
    """Against a second opinion that counts down one by one."""
    number = st.integers(0, 300)

    def check(budgets, delivered):
        most, least = budgets
        left = laws.left_of({"max_new_tokens": most, "min_new_tokens": least}, delivered)
        assert remaining(most, least, delivered) == (left["max_new_tokens"], left["min_new_tokens"])

    for_all(check, st.tuples(number, number), number)


#: One attempt: (tokens that it gives, retractions that it tells of, its weights' version).
ATTEMPT = st.tuples(st.integers(1, 6), st.integers(0, 3), st.sampled_from(["v1", "v2"]))


def _name(number):
    return f"~{number}" if number else "a"


def _events(attempt, before, number, *, last):
    """The events of an attempt, a token each, as a cumulative worker sends them."""
    tokens, retracted, version = attempt
    for count in range(1, tokens + 1):
        meta = {
            "id": _name(number),
            "finish_reason": None,
            "prompt_tokens": 2 + before,
            "weight_version": version,
            "num_retractions": retracted,
            "completion_tokens": count,
            "cached_tokens": number,
        }
        if last and count == tokens:
            meta["finish_reason"] = {"type": "length", "length": tokens}
            meta["weight_versions"] = [{"version": version, "start": 0, "end": tokens}]
        data = json.dumps({"output_ids": list(range(before, before + count)), "meta_info": meta}).encode()
        yield b"data: " + data + b"\n\n", data


def _spans(attempts):
    """Which weights made which tokens: one version a token, then runs of equal ones."""
    versions = [version for tokens, _, version in attempts for _ in range(tokens)]
    edges = [at for at in range(len(versions)) if not at or versions[at] != versions[at - 1]]
    ends = [*edges[1:], len(versions)]
    return [{"version": versions[at], "start": at, "end": end} for at, end in zip(edges, ends, strict=True)]


def test_counters_are_rebased():
    """M1, M2, H2: after any cuts, counts are summed, the prompt's are the first attempt's, spans tile the output."""

    def check(attempts):
        total = sum(tokens for tokens, _, _ in attempts)
        body = {"rid": "a", "stream": True, "input_ids": [7, 8], "sampling_params": {"max_new_tokens": total}}
        exchange = catalog.make("sglang").open(
            NativeRequest("POST", "/generate", HEADERS, json.dumps(body).encode()), "a"
        )
        exchange.admit(CUMULATIVE)
        out, before = b"", 0
        for number, attempt in enumerate(attempts):
            exchange.dispatch(CUMULATIVE, _name(number), float(number))
            exchange.head(200, [(b"content-type", b"text/event-stream")])
            for event in _events(attempt, before, number, last=number == len(attempts) - 1):
                out += exchange.feed([event], float(number))
            before += attempt[0]
        value = json.loads(out.split(b"\n\n")[-2].removeprefix(b"data: "))
        wanted = {
            "id": "a",
            "finish_reason": {"type": "length", "length": total},
            "prompt_tokens": 2,
            "weight_version": attempts[-1][2],
            "num_retractions": sum(retracted for _, retracted, _ in attempts),
            "completion_tokens": total,
            "cached_tokens": 0,
            "weight_versions": _spans(attempts),
        }
        assert value == {"output_ids": list(range(total)), "meta_info": wanted}

    for_all(check, st.lists(ATTEMPT, min_size=1, max_size=4))
