"""From the three sources to one value."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from dyn_relay.config.option import ConfigError, Option
from dyn_relay.config.table import OPTIONS, Config

CONFIG_ENV = "DYN_CONFIG"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and, for each option, where its value came from ("default" included)."""

    config: Config
    origins: Mapping[str, str]


def load(flags: Mapping[str, object], environ: Mapping[str, str], file: str | None = None) -> Loaded:
    """Merge the sources: a flag wins over the environment, that over the file (`file`, else `DYN_CONFIG`).

    `flags` holds only what was given, by option name. An empty environment value counts as not given. Raises
    `ConfigError` for a value that cannot be used, for two names of a variable that differ, and for a key of the file
    that is no option.
    """
    path = file or environ.get(CONFIG_ENV)
    values, origins = merge(OPTIONS, flags, environ, _read_file(path) if path else {}, str(path))
    config = Config(**cast("dict[str, Any]", values))
    return Loaded(config, _folded(config, values, origins))


def _folded(config: Config, values: Mapping[str, object], origins: dict[str, str]) -> dict[str, str]:
    """Where values come from, once what was said in other words is what it means: then it is of those words, too."""
    new = [one.name for one in OPTIONS if getattr(config, one.name) != values.get(one.name, one.default)]
    words = [origins[name] for name in new if not getattr(config, name)]
    kept = {name: [origins[name]] if name in values else [] for name in new if getattr(config, name)}
    return origins | {name: ", ".join((*own, *words)) for name, own in kept.items()}


def merge(
    options: Sequence[Option],
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    stored: Mapping[str, object] = MappingProxyType({}),
    path: str = "",
) -> tuple[dict[str, object], dict[str, str]]:
    """The values that are given, by option, and where each option's value comes from; `stored` is the file `path`'s.

    Raises `ConfigError`.
    """
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for option in options:
        source, raw = "default", None
        if flags.get(option.name) is not None:
            source, raw = option.flag, flags[option.name]
        elif given := {name: environ[name] for name in option.variables if environ.get(name)}:
            if len(set(given.values())) > 1:
                raise ConfigError(f"{option.name}: {' and '.join(given)} differ; {option.env} is enough")
            source, raw = next(iter(given.items()))
        elif option.name in stored:
            source, raw = path, stored[option.name]
        if source == option.flag and not option.choices and raw in ("", ("",)):
            raise ConfigError(f"{option.name}: must not be empty (from {source}); leave the flag out instead")
        origins[option.name] = source
        if source != "default":
            values[option.name] = option.read(raw, source)
    return values, origins


def _read_file(path: str) -> dict[str, object]:
    try:
        stored = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"config: cannot read {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config: {path} is not TOML: {exc}") from exc
    unknown = sorted(stored.keys() - {option.name for option in OPTIONS})
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such option (from {path})")
    return stored
