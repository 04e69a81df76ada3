"""The page for Prometheus, read back with its own parser."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from dyn_relay.observe.metrics import MAX_VALUES, Metrics, watch_loop_lag


def read(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name.removeprefix("dyn_relay_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@dataclass
class Attempt:
    cause: str | None = None
    tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    aggregated: bool = False


def test_every_promised_name_is_there() -> None:
    names = {family.name for family in text_string_to_metric_families(Metrics().render().decode())}
    promised = """requests_in_flight attempts_in_flight requests attempts migrations refusals tokens_delivered
        tokens_saved cached_tokens poison ttft_seconds inter_token_seconds loop_lag_seconds worker_state
        worker_in_flight worker_transitions http_requests discovery_up discovery_workers
             queue_depth retry_queue_depth replay_buffer_bytes queue_refusals queue_wait_seconds
             log_lines_dropped policy_events policy_size aggregated_attempts"""
    assert {f"dyn_relay_{name}" for name in promised.split()} <= names
    assert {name for name in names if not name.startswith("process_")} == {f"dyn_relay_{n}" for n in promised.split()}


def test_lines_that_the_log_has_lost() -> None:
    metrics = Metrics()
    assert read(metrics)["log_lines_dropped_total", ()] == 0
    metrics.watch_log(lambda: 3)
    assert read(metrics)["log_lines_dropped_total", ()] == 3


def test_two_proxies_in_one_process_do_not_mix() -> None:
    one, two = Metrics(), Metrics()
    one.refused("n")
    assert read(one)["refusals_total", (("reason", "n"),)] == 1
    assert ("refusals_total", (("reason", "n"),)) not in read(two)


def test_what_a_migrated_request_leaves() -> None:
    """M2: cached tokens are the first attempt's; delivered tokens are counted once, by the attempt that gave them."""
    metrics = Metrics()
    metrics.attempt_ended(Attempt("cut", 12, 1.0, 2.1))
    metrics.migrated("cut", 12)
    metrics.attempt_ended(Attempt(None, 18, 3.0, 4.7))
    metrics.request_ended("done", 0.2, 7)
    page = read(metrics)
    assert page["attempts_total", (("outcome", "cut"),)] == 1
    assert page["attempts_total", (("outcome", "done"),)] == 1
    assert page["migrations_total", (("reason", "cut"),)] == 1
    assert page["tokens_delivered_total", ()] == 30
    assert page["tokens_saved_total", ()] == 12
    assert page["cached_tokens_total", ()] == 7
    assert page["requests_total", (("outcome", "done"),)] == 1
    assert page["ttft_seconds_count", ()] == 1
    assert page["inter_token_seconds_count", ()] == 11 + 17
    assert page["inter_token_seconds_sum", ()] == pytest.approx(1.1 + 1.7)


def test_attempts_of_pairs_that_one_worker_made_alone() -> None:
    """--decode-fallback; they are among all attempts, too."""
    metrics = Metrics()
    for aggregated in (False, True, True):
        metrics.attempt_ended(Attempt(aggregated=aggregated))
    page = read(metrics)
    assert (page["aggregated_attempts_total", ()], page["attempts_total", (("outcome", "done"),)]) == (2, 3)


def test_an_attempt_without_tokens_has_no_pace() -> None:
    metrics = Metrics()
    for attempt in (Attempt("connect"), Attempt(None, 1, 1.0, 1.0)):
        metrics.attempt_ended(attempt)
    metrics.request_ended("failed", None, None)
    page = read(metrics)
    assert page["inter_token_seconds_count", ()] == 0
    assert page["ttft_seconds_count", ()] == 0


def test_histogram_buckets_are_cumulative_and_bounds_inclusive() -> None:
    metrics = Metrics()
    for value in (0.005, 0.01, 0.011, 300.0, 301.0):
        metrics.ttft_seconds.observe(value)
    page = read(metrics)
    counts = [page["ttft_seconds_bucket", (("le", bound),)] for bound in ("0.01", "0.025", "300.0", "+Inf")]
    assert counts == [2, 3, 4, 5]
    assert page["ttft_seconds_count", ()] == 5


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    for n in range(MAX_VALUES + 50):
        metrics.refused(f"reason{n}")
    metrics.refused("reason0")
    assert len(metrics.refusals_total._children) == MAX_VALUES + 1, "with one for all others"
    page = read(metrics)
    reasons = {key[1]: value for key, value in page.items() if key[0] == "refusals_total"}
    assert len(reasons) == MAX_VALUES + 1
    assert reasons[(("reason", "other"),)] == 50
    assert reasons[(("reason", "reason0"),)] == 2


def test_workers_are_read_at_the_scrape() -> None:
    metrics = Metrics()
    fleet = [("w1", "decode", "ready", 3), ("w2", "prefill", "dead", 0)]
    metrics.watch_fleet(lambda: fleet)
    page = read(metrics)
    assert page["worker_state", (("role", "decode"), ("state", "ready"), ("worker", "w1"))] == 1
    assert page["worker_state", (("role", "prefill"), ("state", "dead"), ("worker", "w2"))] == 1
    assert page["worker_in_flight", (("role", "decode"), ("worker", "w1"))] == 3
    assert page["attempts_in_flight", ()] == 3
    fleet[:] = [("w1", "decode", "draining", 1)]
    page = read(metrics)
    assert ("worker_state", (("role", "decode"), ("state", "ready"), ("worker", "w1"))) not in page
    assert page["attempts_in_flight", ()] == 1


def test_sources_of_workers_are_read_at_the_scrape() -> None:
    metrics = Metrics()
    metrics.watch_discovery(lambda: [("static", True, 2), ("dns", False, 7)])
    page = read(metrics)
    assert page["discovery_up", (("source", "static"),)] == 1
    assert page["discovery_up", (("source", "dns"),)] == 0
    assert page["discovery_workers", (("source", "dns"),)] == 7


async def test_loop_lag_shows_the_worst_of_late(mock_clock: trio.testing.MockClock) -> None:
    """B5: our own loop may be the outage."""
    metrics = Metrics()

    async def turn(seconds: float) -> float:
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(seconds)
        await trio.testing.wait_all_tasks_blocked()
        return read(metrics)["loop_lag_seconds", ()]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_loop_lag, metrics, 0.5, 3)
        assert await turn(0.5) == 0
        assert await turn(2.5) == pytest.approx(2.0)
        assert await turn(0.5) == pytest.approx(2.0)
        assert await turn(0.5) == pytest.approx(2.0)
        assert await turn(0.5) == 0
        nursery.cancel_scope.cancel()
