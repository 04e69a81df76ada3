"""What the proxy counts, for Prometheus; every name begins with `dyn_relay_`.

Labels are bounded: each family knows its values, or at most `MAX_VALUES` of them, and folds the rest into "other".
Nothing is counted per token event. One thread writes, so numbers are plain ones: the library's own have a lock each and
cost five to ten times as much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import prometheus_client
import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

#: Distinct values of one label; engines and clients must not be able to grow the page.
MAX_VALUES = 64
OTHER = "other"
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4


def _believable(count: int) -> int:
    """An engine's own count, or 0 if it is none that a counter takes."""
    return count if 0 <= count < 2**53 else 0


class EndedAttempt(Protocol):
    """What is counted of an attempt; times in seconds of one clock, None for what never came."""

    #: The kind of its failure; None if it ended well.
    cause: str | None
    #: A pair's work was done by one worker alone.
    aggregated: bool
    tokens: int
    first_token: float | None
    last_token: float | None


class Policy(Protocol):
    """What is counted of it; names are bounded."""

    def counts(self) -> Mapping[str, int]:
        """So far."""

    def sizes(self) -> Mapping[str, int]:
        """Now."""


#: (worker id, role, state, live attempts)
WorkerSample = tuple[str, str, str, int]

#: (source of discovery, whether its last answer is a good one, workers that it names)
SourceSample = tuple[str, bool, int]

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0, 120.0)

_QUEUE = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Count:
    """A number that changes while requests are served."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """So many more; of a counter never less than none."""
        self.value += amount


class Histogram(Collector):
    """Counts by upper bound."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, in the histogram's unit, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, sum_value=self._sum)
        yield family


class Labelled(Collector):
    """A counter family. `family("a", "b").inc()`; children are found by one dict lookup."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._children: dict[tuple[str, ...], Count] = {}
        self._values: set[str] = set()
        registry.register(self)

    def __call__(self, *values: str) -> Count:
        """The counter for these label values."""
        child = self._children.get(values)
        if child is None:
            # Not under the values as they are: an endless supply of odd ones would fill the dict.
            child = self._children.setdefault(tuple(map(self._bounded, values)), Count())
        return child

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._children.items():
            family.add_metric(values, count.value)
        yield family

    def _bounded(self, value: str) -> str:
        if value in self._values or len(self._values) < MAX_VALUES:
            self._values.add(value)
            return value
        return OTHER


class Metrics(Collector):
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self._fleet: Callable[[], Iterable[WorkerSample]] = tuple
        self._sources: Callable[[], Iterable[SourceSample]] = tuple
        self._policies: Mapping[str, Policy] = {}
        self._dropped: Callable[[], int] = int

        def gauge(name: str, text: str) -> prometheus_client.Gauge:
            return prometheus_client.Gauge(f"dyn_relay_{name}", text, registry=registry)

        def now(name: str, text: str) -> Count:
            count = Count()
            gauge(name, text).set_function(lambda: count.value)
            return count

        def counter(name: str, text: str) -> Count:
            return labelled(name, text)()

        def labelled(name: str, text: str, *labels: str) -> Labelled:
            return Labelled(registry, f"dyn_relay_{name}", text, labels)

        self.requests_in_flight = now("requests_in_flight", "Logical requests being served.")
        self.queue_depth = gauge("queue_depth", "Requests that wait for --max-concurrent-requests.")
        self.retry_queue_depth = gauge("retry_queue_depth", "Continuations that wait for --retry-permits.")
        self.replay_buffer_bytes = now("replay_buffer_bytes", "Bodies of requests being served.")
        self.loop_lag_seconds = gauge("loop_lag_seconds", "How late the event loop ran, at worst, in the last 15 s.")
        self.requests_total = labelled("requests", "Logical requests that ended.", "outcome")
        self.attempts_total = labelled("attempts", "Attempts that ended.", "outcome")
        self.migrations_total = labelled("migrations", "Requests continued on another worker.", "reason")
        self.refusals_total = labelled("refusals", "Requests served without protection.", "reason")
        self.queue_refusals_total = labelled("queue_refusals", "Requests turned away from the queue.", "reason")
        self.poison_total = labelled("poison", "Steps in finding requests that kill workers.", "event")
        self.worker_transitions_total = labelled("worker_transitions", "Workers that changed state.", "from", "to")
        self.http_requests_total = labelled("http_requests", "HTTP requests answered.", "route", "status_class")
        self.aggregated_attempts_total = counter(
            "aggregated_attempts", "Attempts that went to one worker, since no prefill worker was left."
        )
        self.tokens_delivered_total = counter("tokens_delivered", "Tokens delivered to clients.")
        self.tokens_saved_total = counter("tokens_saved", "Tokens that a migration did not generate again.")
        self.cached_tokens_total = counter("cached_tokens", "Prompt tokens found in a cache, by first attempts.")
        self.ttft_seconds = Histogram(registry, "dyn_relay_ttft_seconds", "Time to the first token.", _TTFT)
        self.queue_wait_seconds = Histogram(registry, "dyn_relay_queue_wait_seconds", "Time in the queue.", _QUEUE)
        self.inter_token_seconds = Histogram(
            registry, "dyn_relay_inter_token_seconds", "Mean time between an attempt's tokens.", _INTER_TOKEN
        )
        prometheus_client.ProcessCollector(registry=registry)
        registry.register(self)

    def request_ended(self, outcome: str, ttft: float | None, cached_tokens: int | None) -> None:
        """A logical request is over. `ttft` in seconds; None for what never came."""
        self.requests_total(outcome).inc()
        if ttft is not None:
            self.ttft_seconds.observe(ttft)
        self.cached_tokens_total.inc(_believable(cached_tokens or 0))

    def attempt_ended(self, attempt: EndedAttempt) -> None:
        """An attempt is over: its cause, and what it delivered at which pace."""
        self.attempts_total(attempt.cause or "done").inc()
        self.aggregated_attempts_total.inc(attempt.aggregated)
        self.tokens_delivered_total.inc(_believable(attempt.tokens))
        if attempt.tokens > 1 and attempt.first_token is not None and attempt.last_token is not None:
            gaps = attempt.tokens - 1
            self.inter_token_seconds.observe((attempt.last_token - attempt.first_token) / gaps, gaps)

    def migrated(self, reason: str, saved: int) -> None:
        """A request goes on elsewhere for `reason`; `saved` tokens need not be generated again."""
        self.migrations_total(reason).inc()
        self.tokens_saved_total.inc(saved)

    def answered(self, route: str, status: int) -> None:
        """An HTTP request is over; `status` 0 if its client saw none."""
        self.http_requests_total(route, f"{status // 100}xx" if status else "none").inc()

    def refused(self, reason: str) -> None:
        """A request is served without protection, because of the field `reason`."""
        self.refusals_total(reason).inc()

    def watch_fleet(self, samples: Callable[[], Iterable[WorkerSample]]) -> None:
        """Ask `samples` for the workers at each scrape; nothing is counted in between."""
        self._fleet = samples

    def watch_discovery(self, samples: Callable[[], Iterable[SourceSample]]) -> None:
        """Ask `samples` for the sources of workers at each scrape."""
        self._sources = samples

    def watch_policies(self, policies: Mapping[str, Policy]) -> None:
        """Ask each, by the role that it chooses for, for its counts and sizes at each scrape."""
        self._policies = policies

    def watch_log(self, dropped: Callable[[], int]) -> None:
        """Ask `dropped` for the log's lost lines at each scrape."""
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        """For the registry: the log, the workers, where they come from, and what the policy counts."""
        yield CounterMetricFamily("dyn_relay_log_lines_dropped", "Lines of the log that were lost.", self._dropped())
        up = GaugeMetricFamily(
            "dyn_relay_discovery_up", "1 if the source's last answer is a good one, else 0.", labels=["source"]
        )
        named = GaugeMetricFamily(
            "dyn_relay_discovery_workers", "Workers in the source's last good answer.", labels=["source"]
        )
        for source, well, workers in self._sources():
            up.add_metric([source], well)
            named.add_metric([source], workers)
        yield up
        yield named
        state = GaugeMetricFamily(
            "dyn_relay_worker_state", "1 for the worker's state.", labels=["worker", "role", "state"]
        )
        load = GaugeMetricFamily("dyn_relay_worker_in_flight", "Attempts at the worker now.", labels=["worker", "role"])
        samples = list(self._fleet())
        total = GaugeMetricFamily(
            "dyn_relay_attempts_in_flight", "Attempts at workers now.", sum(in_flight for *_, in_flight in samples)
        )
        for worker, role, is_, in_flight in samples:
            state.add_metric([worker, role, is_], 1)
            load.add_metric([worker, role], in_flight)
        yield state
        yield load
        yield total
        names = ["role", "event"]
        events = CounterMetricFamily("dyn_relay_policy_events", "What the policy has counted.", labels=names)
        sizes = GaugeMetricFamily("dyn_relay_policy_size", "What the policy remembers now.", labels=["role", "what"])
        for role, policy in self._policies.items():
            for name, count in policy.counts().items():
                events.add_metric([role, name], count)
            for name, size in policy.sizes().items():
                sizes.add_metric([role, name], size)
        yield events
        yield sizes

    def render(self) -> bytes:
        """The page, as text of `CONTENT_TYPE`."""
        return prometheus_client.generate_latest(self.registry)


async def watch_loop_lag(metrics: Metrics, interval: float = 0.5, window: int = 30) -> None:
    """Measure, every `interval` seconds, how late a timer fires; show the worst of the last `window` times.

    A busy loop is the proxy's own outage, and no probe of a worker shows it.
    """
    lags: deque[float] = deque(maxlen=window)
    while True:
        due = trio.current_time() + interval
        await trio.sleep_until(due)
        lags.append(max(0.0, trio.current_time() - due))
        metrics.loop_lag_seconds.set(max(lags))
