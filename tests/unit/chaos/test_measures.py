"""Gaps, percentiles and rates, of histories made by hand."""

from __future__ import annotations

import math

import msgspec
import pytest
from tests.recorded_answers import record
from tests.recorded_runs import attempt, bare, row, stormy, stream

from dyn_chaos import measures
from dyn_chaos.measures import Gap, Spread, Tokens
from dyn_testkit.history import Fault, History, Run, without_answer


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([3.0], 0.5, 3.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 101)), 0.9, 90),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_a_percentile_is_one_of_the_values(values: list[float], share: float, found: float) -> None:
    assert measures.percentile(values, share) == found


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        measures.percentile([], 0.5)
    assert measures.spread([]) is None


def test_a_spread_counts_and_ranks() -> None:
    assert measures.spread(float(number) for number in range(10, 0, -1)) == Spread(10, 5.0, 9.0, 10.0, 10.0)


def test_pauses_lie_between_events() -> None:
    record = stream("a", 1.0, (0.25, 2.0))
    assert [(gap.begin, gap.seconds) for gap in measures.pauses(record)] == [(1.5, 0.25), (1.75, 2.0)]
    assert measures.longest_pause(record) == 2.0
    assert measures.longest_pause(stream("b", 0.0, (0, 0), times=[1.0])) is None


def test_progress_never_goes_back() -> None:
    said = stream("a", 0.0, (0.5, 0.5))
    assert measures.progress(said) == [(0.5, 1), (1.0, 2), (1.5, 4)]
    broken = stream("a", 0.0, (0.5, 0.5), events=[said.events[1], '{"error":', said.events[0]])
    assert measures.progress(broken) == [(0.5, 2), (1.0, 2), (1.5, 2)]
    assert measures.tokens(broken) == 2


def test_a_continuation_begins_with_its_first_token() -> None:
    cut = attempt(0, "w1", ended=2.0, tokens=3, cause="cut")
    refused = attempt(1, "w2", started=2.0, first_token=None, ended=2.5, tokens=0, resumed_from=3, cause="connect")
    went_on = attempt(2, "w2", started=2.5, first_token=4.0, ended=6.0, tokens=2, resumed_from=3)
    assert list(measures.resumptions("k", row("r", 110.0, cut, refused, went_on), 100.0)) == [Gap("k", 12.0, 14.0)]


@pytest.mark.parametrize(
    "attempts",
    [
        [attempt(0, "w1")],
        [attempt(0, "w1", cause="cut")],
        [attempt(0, "w1", cause="left"), attempt(1, "w2")],
        [attempt(0, "w1", cause="refused"), attempt(1, "w2")],
        [attempt(0, "w1", first_token=None, tokens=0, cause="connect"), attempt(1, "w2")],
    ],
    ids=["whole", "never resumed", "given up", "refused", "had not begun"],
)
def test_what_is_no_continuation(attempts: list[dict[str, object]]) -> None:
    assert list(measures.resumptions("k", row("r", 0.0, *attempts))) == []


def test_each_cut_has_its_own_gap() -> None:
    attempts = [
        attempt(0, "w1", first_token=0.5, ended=1.0, tokens=1, cause="cut"),
        attempt(1, "w2", first_token=1.5, ended=2.0, tokens=1, resumed_from=1, cause="stall"),
        attempt(2, "w1", first_token=3.0, ended=4.0, tokens=2, resumed_from=2),
    ]
    assert [gap.seconds for gap in measures.resumptions("k", row("r", 0.0, *attempts))] == [0.5, 1.0]


def test_the_faults_last_from_the_first_to_the_end_of_the_last() -> None:
    assert measures.window([]) is None
    faults = [Fault("kill", "a", 5.0, 6.0), Fault("stop", "a", 3.0, 9.0), Fault("kill", "b", 8.0)]
    assert measures.window(faults[:2]) == (3.0, 9.0)
    assert measures.window(faults) == (3.0, math.inf)


@pytest.mark.parametrize(
    ("begin", "end", "phase"),
    [(0, 2, "before"), (0, 3, "during"), (4, 5, "during"), (0, 20, "during"), (9, 10, "during"), (9.5, 10, "after")],
)
def test_a_gap_that_overlaps_the_faults_is_during_them(begin: float, end: float, phase: str) -> None:
    assert measures.phase(Gap("k", begin, end), (3.0, 9.0)) == phase


def test_recovery_takes_the_longest_pause_of_each_stream_and_phase() -> None:
    history, _ = stormy()
    before, during, after = measures.recovery(history)
    assert [each.phase for each in (before, during, after)] == ["before", "during", "after"]
    assert before.pauses is not None
    assert before.pauses.count == 12  # 000 to 010, and the first pause of "moved"
    assert before.pauses.worst == pytest.approx(0.1)
    assert during.pauses is not None
    assert during.pauses.worst == pytest.approx(2.0)
    assert during.resumptions == Spread(*(1, *(pytest.approx(1.7),) * 4))
    assert after.resumptions is None


def test_without_faults_there_is_one_phase() -> None:
    [whole] = measures.recovery(bare())
    assert (whole.phase, whole.resumptions) == ("undisturbed", None)
    assert whole.pauses is not None
    assert whole.pauses.count == 1


def test_rows_are_found_by_rid_by_id_and_by_time() -> None:
    history = History(Run(began=100.0))
    nameless = record("unary").body | {"rid": None}
    history.add(record("unary", key="rid", body={**nameless, "rid": "mine"}))
    history.add(record("unary", key="id", body=nameless))
    history.add(record("unary", key="time", body=nameless, text="", sent=7.0))
    history.add(record("unary", key="too late", body=nameless, text="", sent=12.0))
    history.rows += [row("x", 108.0), row("y", 107.5), row("own", 100.0), row("mine", 100.0)]
    assert {key: found["rid"] for key, found in measures.rows_by_key(history).items()} == {
        "rid": "mine",
        "id": "own",
        "time": "y",
    }


def test_tokens_come_when_the_client_or_the_router_has_them() -> None:
    history = bare()
    streams, unary = measures.deliveries(history)
    assert [(each.begin, each.count) for each in streams] == [(0.5, 1), (0.6, 1), (pytest.approx(0.7), 2)]
    assert unary == [Tokens(0.0, 1.0, 4)]
    cut = attempt(0, "w1", first_token=None, tokens=0, cause="connect")
    history.rows.append(row("own", 2.0, cut, attempt(1, "w1", first_token=1.0, ended=3.0)))
    assert measures.deliveries(history)[1] == [Tokens(3.0, 5.0, 4)]


def test_an_answer_that_was_not_kept_counts_as_its_row_says() -> None:
    history = History(Run(traced=True))
    for streaming in (True, False):
        kept = without_answer(record("cumulative" if streaming else "unary", key=str(streaming), ended=1.0), 4)
        history.add(msgspec.structs.replace(kept, body={**kept.body, "rid": str(streaming)}))
        assert measures.tokens(kept) == 4
    history.rows.append(row("True", 0.0, attempt(0, "w1", first_token=0.5, ended=2.0)))
    streams, unary = measures.deliveries(history)
    assert streams == [Tokens(0.5, 2.0, 4)]
    assert unary == [Tokens(0.0, 1.0, 4)]


def test_rates_are_of_equal_parts_of_the_time() -> None:
    given = [Tokens(0.0, 0.0, 3), Tokens(9.9, 9.9, 2), Tokens(2.5, 7.5, 10), Tokens(10.0, 10.0, 1)]
    assert measures.throughput(given, 0.0, 10.0, 4) == pytest.approx([1.2, 2.0, 2.0, 1.2])
    assert measures.throughput([], 0.0, 1.0, 2) == [0.0, 0.0]


def test_tokens_are_neither_lost_nor_made() -> None:
    given = [Tokens(0.13 * number, 0.31 * number, number) for number in range(40)]
    rates = measures.throughput(given, 0.0, 13.0, 17)
    assert sum(rates) * 13.0 / 17 == pytest.approx(sum(each.count for each in given))


def test_a_run_lasts_until_the_last_thing_known_of_it() -> None:
    assert measures.span(History()) == (0.0, 1.0)
    history, _ = stormy()
    assert measures.span(history) == (0.0, 43.5)
