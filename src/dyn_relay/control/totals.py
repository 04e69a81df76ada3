"""One page of metrics for several processes.

Counters and histograms must never fall: Prometheus takes a fall for a restart from zero, and would count all that is
left once more. But a process that dies takes its own with it. So each leaves, in a file, the page that it last told a
scraper, and whoever answers adds the counters of those that do not answer from there: what was told once stays told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import structlog
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("totals")

#: Of what the sum would mean nothing.
FOLDS: dict[str, Callable[[float, float], float]] = {
    "dyn_relay_loop_lag_seconds": max,
    "process_max_fds": min,
    "dyn_relay_discovery_up": min,
    "dyn_relay_discovery_workers": max,
    "process_start_time_seconds": min,
}
_COUNTED = ("counter", "histogram")


class Pages:
    """What each process of a proxy has told of itself, in a directory of theirs."""

    def __init__(self, directory: Path, number: int, count: int) -> None:
        #: Of this life of this process.
        self.name = f"{number}-{os.getpid()}"
        self._count = count
        self._directory = directory

    def keep(self, page: bytes) -> None:
        """This is told now. A page that cannot be written down will be missing once the process is."""
        draft = self._directory / f".{self.name}"
        try:
            draft.write_bytes(page)
            draft.replace(self._directory / f"page-{self.name}")
        except OSError as exc:
            log.warning("a page of metrics is not kept", error=str(exc))

    def total(self, living: Mapping[str, bytes]) -> bytes:
        """The page for all: `living` by name are those that answer, the others' counters are as they told them."""
        kept = self._directory.glob("page-*")
        departed = [page.read_bytes() for page in kept if page.name.removeprefix("page-") not in living]
        up = GaugeMetricFamily("dyn_relay_process_up", "1 for a process that has answered.", labels=["process"])
        numbers = {name.partition("-")[0] for name in living}
        for number in range(self._count):
            up.add_metric([str(number)], float(str(number) in numbers))
        return summed(living.values(), departed, [up])


def summed(living: Iterable[bytes], departed: Iterable[bytes], more: Collection[Metric] = ()) -> bytes:
    """Pages as one, in Prometheus' text format 0.0.4; of `departed` ones only what counts up. `more` comes last."""
    total = _Total()
    for page in living:
        for family in text_string_to_metric_families(page.decode()):
            total.add(family)
    for page in departed:
        for family in text_string_to_metric_families(page.decode()):
            if family.type in _COUNTED:
                total.add(family)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given([*total.families(), *more]))
    return generate_latest(registry)


_Key = tuple[str, tuple[tuple[str, str], ...]]


class _Total:
    def __init__(self) -> None:
        self._families: dict[str, tuple[Metric, dict[_Key, float]]] = {}

    def add(self, family: Metric) -> None:
        found = Metric(family.name, family.documentation, family.type), dict[_Key, float]()
        _, values = self._families.setdefault(family.name, found)
        fold = FOLDS.get(family.name, float.__add__)
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            values[key] = fold(values[key], sample.value) if key in values else sample.value

    def families(self) -> Iterator[Metric]:
        for family, values in self._families.values():
            for (name, labels), value in values.items():
                family.add_sample(name, dict(labels), value)
            yield family


class _Given(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
