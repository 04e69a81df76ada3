"""The formats that are installed, by the name that `--format` takes: entry points of the group `dyn_relay.formats`.

The built-in `sglang` is one of them, declared in this distribution as any other is in its own. Nothing is imported but
the one that is chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, Protocol, cast

from dyn_relay.formats.base import Format
from dyn_relay.formats.traits import Traits
from dyn_relay.formats.weights import WeightPolicy

GROUP = "dyn_relay.formats"

#: What a format has that is no method, and what that must be.
_VALUES: dict[str, type] = {
    "name": str,
    "paths": frozenset,
    "methods": frozenset,
    "info_paths": tuple,
    "ready_path": str,
    "stock": Traits,
}
_METHODS = tuple(name for name, value in vars(Format).items() if callable(value) and not name.startswith("_"))
#: What the `codec` of a format that has one can do.
_CODEC = ("decode", "encode", "width", "rows", "join")


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
    except (Exception, SystemExit) as exc:  # importing runs code of somebody else's
        raise ValueError(f"{name!r}, of the distribution {_source(point)}, cannot be loaded: {exc!r}") from exc
    return cast("Factory", factory)


def _source(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _lacks(format: object) -> Iterator[str]:
    """What makes it no `Format`."""
    for name, kind in _VALUES.items():
        value = getattr(format, name, None)
        if not isinstance(value, kind):
            yield f"`{name}` is no {kind.__name__}" if hasattr(format, name) else f"it has no `{name}`"
    for name in _METHODS:
        if not callable(getattr(format, name, None)):
            yield f"it has no method `{name}`"
    codec = getattr(format, "codec", format)
    if codec is not format and (isinstance(codec, type) or not all(callable(getattr(codec, one, 0)) for one in _CODEC)):
        yield "`codec` is no `Codec`"


def make(
    name: str,
    on_abort: Literal["relay", "resume"] = "relay",
    weight_version_policy: str = "any",
    *,
    tell_recomputed_rows: bool = False,
    pd_disaggregation: bool = False,
    trust_client_bootstrap: bool = False,
) -> Format:
    """A format by name, with the options of the same names.

    Raises `ValueError`, which says whose it is, if it cannot be made, or lacks what a format has.
    """
    factory, weights = load(name), WeightPolicy(weight_version_policy)
    [point] = installed()[name]
    whose = f"{name!r}, of the distribution {_source(point)}"
    try:
        format = factory(
            on_abort,
            weights,
            tells_recomputed=tell_recomputed_rows,
            paired=pd_disaggregation,
            trusts_bootstrap=trust_client_bootstrap,
        )
        lacks = [*_lacks(format)]
    except ValueError as exc:
        raise ValueError(f"{whose}: {exc}") from exc
    except (Exception, SystemExit) as exc:  # as above
        raise ValueError(f"{whose}, cannot be made: {exc!r}") from exc
    if lacks:
        raise ValueError(f"{whose}, gives {format!r:.80}, which is no format: {', '.join(lacks[:3])}")
    return format
