"""What an option is: how its value is read, checked and shown."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dyn_relay.config.checks import is_key


class ConfigError(ValueError):
    """A value cannot be used. The message names the option, what is wrong, and where the value came from."""


def option(
    section: str,
    default: object,
    text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    env: str = "",
    secret: bool = False,
    verify: Callable[[object], None] | None = None,
    metavar: str = "",
    repeats: bool = False,
) -> Any:
    """A field of the table. A `secret` is shown to nobody.

    `env`: the variable's name, if it is not the usual one, which then counts as well.
    """
    rules: dict[str, object] = {"section": section, "help": text, "minimum": minimum, "maximum": maximum}
    rules |= {
        "repeats": repeats,
        "env": env,
        "metavar": metavar,
        "secret": secret,
        "verify": is_key if secret else verify,
    }
    return dataclasses.field(default=default, repr=not secret, metadata=rules)


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of value: its words, and its reader: takes a string or a TOML value, raises Type- or ValueError."""

    word: str
    metavar: str
    read: Callable[[object], object]


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    kind: Kind
    choices: tuple[str, ...]
    default: object
    section: str
    help: str
    minimum: float | None
    maximum: float | None
    env: str
    secret: bool
    #: Of a list: the same item may come twice, since it is a port of the one before it.
    repeats: bool
    verify: Callable[[object], None] | None
    #: How its value is called in the help, if not by its kind.
    metavar: str

    @property
    def flag(self) -> str:
        """The long flag, e.g. `--log-json`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment's names for it, the documented one first."""
        return tuple(dict.fromkeys((self.env, _usual_env(self.name))))

    @property
    def many(self) -> bool:
        """It takes several values."""
        return self.kind in (_LIST, _PORTS)

    @property
    def switch(self) -> bool:
        """It is on or off: the flag takes no value and has a `--no-` twin."""
        return self.kind is _BOOL

    def read(self, raw: object, source: str) -> object:
        """A value from the outside, as its type. Raises `ConfigError`."""
        try:
            value = self.kind.read(raw)
        except (TypeError, ValueError):
            raise self._error(f"must be {self.kind.word}", raw, source) from None
        if isinstance(value, tuple) and not self.repeats:
            value = tuple(dict.fromkeys(value))
        self.check(value, source)
        return value

    def check(self, value: object, source: str) -> None:
        """Raise `ConfigError` unless `value`, of the right type, is within the option's bounds."""
        if isinstance(value, int | float):
            if self.minimum is not None and not value >= self.minimum:
                raise self._error(f"must be at least {self.minimum:g}", value, source)
            if self.maximum is not None and not value <= self.maximum:
                raise self._error(f"must be at most {self.maximum:g}", value, source)
        if self.choices and value is not None and value not in self.choices:
            raise self._error("must be one of " + ", ".join(self.choices), value, source)
        if self.verify is not None:
            try:
                self.verify(value)
            except ValueError as exc:
                raise ConfigError(f"{self.name}: {exc} (from {source})") from None

    def show(self, value: object) -> str:
        """The value for people; a secret is never shown."""
        if value is None or value == ():
            return ""
        if self.secret:
            return "***"
        if isinstance(value, tuple):
            return " ".join(value)
        if isinstance(value, bool):
            return str(value).lower()
        return f"{value:g}" if isinstance(value, float) else str(value)

    def _error(self, problem: str, value: object, source: str) -> ConfigError:
        return ConfigError(f"{self.name}: {problem}{'' if self.secret else f', not {value!r}'} (from {source})")


def _usual_env(name: str) -> str:
    return f"DYN_{name.upper()}"


def _read_text(raw: object) -> object:
    if not isinstance(raw, str):
        raise TypeError
    return raw


def _read_int(raw: object) -> object:
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise TypeError
    return int(raw)


def _read_float(raw: object) -> object:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float) or not math.isfinite(float(raw)):
        raise ValueError
    return float(raw)


_SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _read_bool(raw: object) -> object:
    if isinstance(raw, bool):
        return raw
    if not isinstance(raw, str) or raw.lower() not in _SWITCH:
        raise ValueError
    return _SWITCH[raw.lower()]


def _read_list(raw: object) -> object:
    items = [raw] if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError
    return tuple(part for item in items for part in item.replace(",", " ").split())


def _read_ports(raw: object) -> object:
    """In a TOML list ports may be numbers, and a URL and its port a list of their own."""
    if isinstance(raw, list | tuple):
        flat = [item for one in raw for item in (one if isinstance(one, list | tuple) else [one])]
        raw = [str(item) if type(item) is int else item for item in flat]
    return _read_list(raw)


_BOOL = Kind("true or false", "", _read_bool)
_LIST = Kind("a list of strings", "TEXT ...", _read_list)
_PORTS = Kind("a list of strings, ports among them", "TEXT ...", _read_ports)
_TEXT = Kind("a string", "TEXT", _read_text)
_KINDS: dict[object, Kind] = {
    str: _TEXT,
    int: Kind("a whole number", "N", _read_int),
    float: Kind("a number", "N", _read_float),
    bool: _BOOL,
    tuple[str, ...]: _LIST,
}


def options_of(table: type[Any]) -> tuple[Option, ...]:
    """The rows of a table whose fields are made by `option`."""
    hints = typing.get_type_hints(table)
    rows = []
    for field in dataclasses.fields(table):
        hint = hints[field.name]
        if type(None) in typing.get_args(hint):
            hint = typing.get_args(hint)[0]
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        rules = {**field.metadata, "env": field.metadata["env"] or _usual_env(field.name)}
        kind = _TEXT if choices else _PORTS if rules["repeats"] else _KINDS[hint]
        rows.append(Option(name=field.name, kind=kind, choices=choices, default=field.default, **rules))
    return tuple(rows)
