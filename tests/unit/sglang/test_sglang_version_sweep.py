"""H2, H3: weights that change anywhere, in answers that are cut anywhere: each token has the label of who made it.

A sweep over random changes, cuts, dialects and paces, against an oracle that counts for itself. A unary answer is
exact. A stream's client has the tokens before anybody knows: there a token may have the label of the last one in its
event.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang_kit import DIALECTS, SSE_HEAD, Engine, check_body, opened, oracle, read_stream

from dyn_relay.formats.base import End
from dyn_relay.formats.traits import Traits

MOST = 14


@dataclass
class Updated(Engine):
    """An engine whose weights change before each of these tokens of an attempt."""

    turns: tuple[int, ...] = ()

    def label(self, token: int) -> str:
        return str(int(self.version) + sum(turn <= token for turn in self.turns))

    def spans(self, total: int) -> list[dict[str, Any]]:
        edges = [0, *sorted({turn for turn in self.turns if 0 < turn < total}), total]
        return [{"version": self.label(start), "start": start, "end": end} for start, end in itertools.pairwise(edges)]


@dataclass(frozen=True)
class Part:
    """One attempt: its engine, and after how many events it is cut."""

    engine: Updated
    cut: int


engines = st.builds(
    Updated,
    dialect=st.sampled_from(DIALECTS),
    chunks=st.lists(st.integers(1, 5), max_size=6).map(tuple),
    version=st.integers(1, 30).map(str),
    turns=st.lists(st.integers(0, MOST), max_size=3).map(tuple),
    late_finish=st.booleans(),
)
parts = st.builds(Part, engines, st.integers(0, 6))


def bodies(stream: bool, most: int, least: int) -> dict[str, Any]:
    params = {"max_new_tokens": most, "min_new_tokens": min(least, most)}
    return {"rid": "mine", "input_ids": [1, 2, 3], "sampling_params": params, "return_logprob": True, "stream": stream}


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    body=st.builds(bodies, st.booleans(), st.integers(1, MOST), st.integers(0, MOST)),
    cuts=st.lists(parts, max_size=3),
    last=engines,
)
def test_every_token_has_its_makers_label(body: dict[str, Any], cuts: list[Part], last: Updated) -> None:
    told_first = {"weight_version": cuts[0].engine.label(0) if cuts else last.label(0)}
    exchange = opened(body, Traits(sampling_defaults={}, **told_first))
    wanted, labels, coarse, out, now = oracle(body), [], [], b"", 1.0
    for number, part in enumerate([*cuts, Part(last, 1000)]):
        engine = part.engine
        traits = Traits(sampling_defaults={}, weight_version=engine.label(0))
        sent = json.loads(exchange.dispatch(traits, f"try-{number}" if number else "mine", now).body)
        base = exchange.delivered
        check_body(body, sent, wanted, base)
        exchange.head(200, SSE_HEAD)
        events = engine.events(sent)
        for event in events[: part.cut]:
            now += 1.0
            out += exchange.feed([event], now)
        if exchange.end is None:
            out += exchange.complete(now) or b""
        made = exchange.delivered - base
        assert exchange.attempt_tokens == made
        labels += [engine.label(token) for token in range(made)]
        ends = [json.loads(data)["meta_info"]["completion_tokens"] for _, data in events[:-1]]
        upto = [next(end for end in ends if end > token) for token in range(made)]
        known = part.cut >= len(events) - 1  # the engine's own finish has come
        coarse += labels[base:] if known else [engine.label(end - 1) for end in upto]
        if exchange.end is not None:
            break
    assert exchange.end is End.FINISHED, exchange.detail
    if body["stream"]:
        values = [json.loads(piece[6:]) for piece in out.split(b"\n\n")[:-2]]
        dialect = next(each for each in DIALECTS if readable(values, each))
        answer = read_stream(values, dialect)
        ids, meta = answer["ids"], answer["last"]["meta_info"]
    else:
        whole = json.loads(exchange.answer(now).body)
        ids, meta = whole["output_ids"], whole["meta_info"]
    assert ids == wanted.ids
    assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == len(ids)
    assert meta["finish_reason"] == wanted.finish
    tiles = meta["weight_versions"]
    assert [0, *(span["end"] for span in tiles)] == [*(span["start"] for span in tiles), len(ids)]
    assert all(one["version"] != two["version"] for one, two in itertools.pairwise(tiles))
    said = [span["version"] for span in tiles for _ in range(span["start"], span["end"])]
    if body["stream"]:
        assert all(one in pair for one, *pair in zip(said, labels, coarse, strict=True))
    else:
        assert said == labels
    assert meta["weight_version"] == said[-1] == tiles[-1]["version"]
    assert exchange.crossed_versions() == (len(set(said)) > 1)


def readable(values: list[dict[str, Any]], dialect: str) -> bool:
    try:
        read_stream(values, dialect)
    except AssertionError:
        return False
    return True
