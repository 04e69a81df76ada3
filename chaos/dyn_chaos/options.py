"""The options of the campaigns' commands, each with its type; a value that cannot be read names its option."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from dyn_chaos import distribution, processes
from dyn_chaos.actions.signals import DEADLY
from dyn_chaos.campaigns.base import Campaign
from dyn_chaos.fleet import port_of
from dyn_chaos.mix import SENDERS
from dyn_chaos.selection import Mode

T = TypeVar("T")

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|)", re.ASCII)


def reading(read: Callable[[str], T]) -> Callable[[str], T]:
    """A click type of a function that raises `ValueError` with something to say."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return convert


def seconds(text: str) -> float:
    """`5s`, `500ms`, `2m`, `5`. Raises `ValueError`."""
    spelled = _DURATION.fullmatch(text)
    if spelled is None:
        raise ValueError(f"{text!r} is no time, as 5s, 500ms or 2m")
    return float(spelled[1]) * _UNITS[spelled[2]]


def words(text: str) -> list[str]:
    """As a shell splits them. Raises `ValueError`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def share(text: str) -> float:
    """`30%` or `0.3`, in [0, 1]. Raises `ValueError`."""
    spelled = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text, re.ASCII)
    value = float(spelled[1]) / (100 if spelled[2] else 1) if spelled else -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is no share, as 30% or 0.3")
    return value


def url(text: str) -> str:
    """A base URL of this machine, with a port. Raises `ValueError`."""
    if not re.fullmatch(r"http://(127\.\d+\.\d+\.\d+|localhost):\d+/?", text, re.ASCII):
        raise ValueError(f"{text!r} is not http://127.0.0.1:PORT: campaigns are for engines of this machine")
    if not 0 < port_of(text.rstrip("/")) < 2**16:
        raise ValueError(f"{text!r}: there is no such port")
    return text.rstrip("/")


def pid(text: str) -> int:
    """A live process. Raises `ValueError`."""
    if not text.isdecimal() or int(text) < 2 or not processes.state(int(text)):
        raise ValueError(f"there is no process {text!r} on this machine")
    return int(text)


_SECONDS = reading(seconds)
_WORDS = reading(words)
_NUMBERS = reading(distribution.parse)


def _show(value: float | None) -> str | None:
    return None if value is None else f"{value:g}s"


def _default(value: object, otherwise: str) -> bool | str:
    """How click shall show a default: itself, or what its absence means."""
    return otherwise if value is None else True


def of(row: Campaign) -> list[click.Parameter]:
    """The options of one row, its values their defaults."""
    return [*_of_engines(row), *_of_load(row), *_of_strike(row), *_of_run()]


def _option(*names: str, **settings: object) -> click.Option:
    return click.Option(list(names), **settings)  # type: ignore[arg-type]


def _of_engines(row: Campaign) -> list[click.Parameter]:
    return [
        _option("--workers", type=click.IntRange(2), default=row.workers, show_default=True, help="How many to start."),
        _option("--engine", type=click.Choice(["mock"]), default="mock", show_default=True, help="What to start."),
        _option(
            "--engine-flag",
            "engine_flags",
            type=_WORDS,
            multiple=True,
            metavar="FLAGS",
            help="For dyn-mock-worker, split as a shell does; repeat.  [default: --tick 0.005]",
        ),
        _option(
            "--engine-cmd",
            type=_WORDS,
            metavar="CMD",
            help="Start this instead, ready once its /health is 200: '... --port {port}', maybe '--host {host}'.",
        ),
        _option(
            "--attach",
            "attached",
            type=reading(url),
            metavar="URL",
            multiple=True,
            help="Use a running engine of this machine; repeat, each with its --pid.",
        ),
        _option(
            "--pid",
            "pids",
            type=reading(pid),
            metavar="PID",
            multiple=True,
            help="The process of --attach; if it leads a process group, the group is meant.",
        ),
        _option(
            "--relay-flag",
            "relay_flags",
            type=_WORDS,
            multiple=True,
            metavar="FLAGS",
            help="For dyn-relay serve, e.g. '--migration-limit 1', split as a shell does; repeat.",
        ),
    ]


def _of_load(row: Campaign) -> list[click.Parameter]:
    load = row.load
    often: list[click.Parameter] = []
    if load.requests is not None:
        often += [
            _option(
                "--streams",
                "requests",
                type=click.IntRange(1),
                default=load.requests,
                show_default=True,
                help="Requests, streamed and unary ones.",
            )
        ]
    else:
        often += [
            _option(
                "--minutes",
                type=click.FloatRange(0, min_open=True),
                default=load.minutes,
                show_default=True,
                help="How long clients send requests.",
            )
        ]
    return [
        *often,
        _option(
            "--clients",
            type=click.IntRange(1),
            default=load.clients,
            show_default=_default(load.clients, "one a request"),
            help="Clients, each with one request at a time.",
        ),
        _option(
            "--tokens",
            type=_NUMBERS,
            default=str(load.tokens),
            show_default=True,
            metavar="NUMBERS",
            help="Output lengths: N, LOW-HIGH, or log:LOW-HIGH.",
        ),
        _option(
            "--prompt",
            type=_NUMBERS,
            default=str(load.prompt),
            show_default=True,
            metavar="NUMBERS",
            help="Prompt lengths.",
        ),
        _option(
            "--think",
            type=_NUMBERS,
            default=str(load.think),
            show_default=True,
            metavar="SECONDS",
            help="What a client waits before its next request.",
        ),
        _option(
            "--sse",
            type=reading(share),
            default=f"{load.sse:.0%}",
            show_default=True,
            metavar="SHARE",
            help="How many of the requests are streams.",
        ),
        _option(
            "--user",
            "users",
            type=click.Choice(SENDERS),
            multiple=True,
            help="Whose bodies; repeat.  [default: everybody's]",
        ),
    ]


def _of_strike(row: Campaign) -> list[click.Parameter]:
    order, when = row.order, row.when
    found = [
        _option(
            "--target",
            default=order.target,
            show_default=True,
            metavar="WHO",
            help="busiest, idlest, random, or a worker: worker-0, or the URL of an attached one.",
        ),
        _option(
            "--mode",
            type=reading(Mode),
            default=order.mode.text,
            show_default=True,
            metavar="MODE",
            help="How many: one, all, all-but-one, N or N%.",
        ),
        _option(
            "--after-streams",
            type=click.IntRange(1),
            default=when.streams,
            show_default=_default(when.streams, "all of them"),
            help="Strike once so many streams have begun.",
        ),
        _option(
            "--after-tokens",
            type=click.IntRange(1),
            default=when.tokens,
            show_default=True,
            help="... and have so many tokens each.",
        ),
        _option(
            "--at",
            type=_SECONDS,
            default=_show(when.at),
            show_default=_default(when.at, ""),
            metavar="TIME",
            help="Strike so long after the load began instead.",
        ),
        _option(
            "--duration",
            type=_SECONDS,
            default=_show(order.duration),
            show_default=_default(order.duration, "never"),
            metavar="TIME",
            help="Undo it after this time: start the process again, let it go on, heal.",
        ),
    ]
    if order.every is not None:
        found += [
            _option(
                "--kill-every",
                "every",
                type=_SECONDS,
                default=_show(order.every),
                show_default=True,
                metavar="TIME",
                help="From one kill to the next.",
            )
        ]
    if "signal" in row.options:
        found += [
            _option(
                "--signal",
                type=click.Choice(list(DEADLY)),
                show_default=True,
                default=row.choices.signal.name.removeprefix("SIG"),
                help="What the processes get.",
            )
        ]
    if "grace" in row.options:
        found += [
            _option(
                "--grace",
                type=_SECONDS,
                default=_show(row.choices.grace),
                show_default=True,
                metavar="TIME",
                help="SIGKILL what minds no signal after this time.",
            )
        ]
    if "loss" in row.options:
        found += [
            _option(
                "--loss",
                type=reading(share),
                default="100%",
                show_default=True,
                metavar="SHARE",
                help="How many packets are lost, each way.",
            )
        ]
    return list(found)


def _of_run() -> list[click.Parameter]:
    return [
        _option("--seed", type=int, default=0, show_default=True, help="Chooses requests and workers."),
        _option(
            "--patience",
            type=_SECONDS,
            default="60s",
            show_default=True,
            metavar="TIME",
            help="Within this time of its sending, or of the last fault's end, every request must have ended.",
        ),
        _option(
            "--out",
            type=click.Path(path_type=Path, file_okay=False),
            help="Keep history.jsonl, summary.json and logs here; without, a run that finds nothing leaves nothing.",
        ),
    ]
