"""The formats that are installed, by the name that `--format` takes: entry points of the group `dyn_relay.formats`.

The built-in `sglang` is one of them, declared in this distribution as any other is in its own. Nothing is imported but
the one that is chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, Protocol, cast

from dyn_relay.formats.base import Format
from dyn_relay.formats.weights import WeightPolicy

GROUP = "dyn_relay.formats"


class Factory(Protocol):
    """What an entry point names: makes a format, with the options of `make`. A subclass of `SglangFormat` is one."""

    def __call__(
        self,
        on_abort: Literal["relay", "resume"],
        weights: WeightPolicy,
        *,
        tells_recomputed: bool,
        paired: bool,
        trusts_bootstrap: bool,
    ) -> Format:
        """Raises `ValueError` for options that it cannot serve."""


@cache
def installed() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Who declares a format, by its name. Looked up once: reading what is installed takes milliseconds."""
    found: defaultdict[str, tuple[EntryPoint, ...]] = defaultdict(tuple)
    for point in entry_points(group=GROUP):
        found[point.name] += (point,)
    return dict(found)


def load(name: str) -> Factory:
    """What makes the format of this name. Raises `ValueError` if there is none, or several, or it cannot be loaded."""
    points = installed().get(name, ())
    if not points:
        raise ValueError(f"no format is named {name!r}; installed are: {', '.join(sorted(installed())) or 'none'}")
    if len(points) > 1:
        raise ValueError(f"{name!r} is claimed by several distributions: {', '.join(sorted(map(_source, points)))}")
    [point] = points
    try:
        factory = point.load()
        if not callable(factory):
            raise TypeError(f"{point.value} cannot be called")
    except Exception as exc:  # importing runs code of somebody else's
        raise ValueError(f"{name!r}, of the distribution {_source(point)}, cannot be loaded: {exc!r}") from exc
    return cast("Factory", factory)


def _source(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def make(
    name: str,
    on_abort: Literal["relay", "resume"] = "relay",
    weight_version_policy: str = "any",
    *,
    tell_recomputed_rows: bool = False,
    pd_disaggregation: bool = False,
    trust_client_bootstrap: bool = False,
) -> Format:
    """A format by name, with the options of the same names. Raises `ValueError`."""
    return load(name)(
        on_abort,
        WeightPolicy(weight_version_policy),
        tells_recomputed=tell_recomputed_rows,
        paired=pd_disaggregation,
        trusts_bootstrap=trust_client_bootstrap,
    )
