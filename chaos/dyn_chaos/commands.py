"""A command for each row of the campaigns' table."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import dyn_relay.cli
import dyn_testkit.cli
from dyn_chaos import options, processes
from dyn_chaos.actions.signals import DEADLY, members
from dyn_chaos.campaigns.base import Campaign, Choices, Load, When
from dyn_chaos.fleet import Attached
from dyn_chaos.mix import SHORTEST, STREAMING
from dyn_chaos.run import SIDECAR, WORKER, Setup
from dyn_relay.config import Config, ConfigError, load
from dyn_testkit.engine import Model
from dyn_testkit.oracle import Oracle

#: Of a mock worker, if nothing else is said: 256 tokens take more than a second.
TICK = ("--tick", "0.005")

#: What a campaign tells its proxy itself.
OURS = ("host", "port", "worker_urls", "trace_file")

#: Of a context: what was said on the command line.
_WORDS = "dyn_chaos.words"

Runner = Callable[[Campaign, Setup, Path | None], None]


def command(row: Campaign, runner: Runner) -> click.Command:
    """The row as a command: it reads its options and calls `runner`."""

    def callback(**given: Any) -> None:
        campaign = _campaign(row, given)
        runner(campaign, _setup(campaign, given), given["out"])

    return _Remembering(row.name, callback=callback, params=options.of(row), help=row.text)


class _Remembering(click.Command):
    """Keeps what was said, word by word, for the history."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As ever."""
        ctx.meta[_WORDS] = shlex.join(["dyn-chaos", self.name or "", *args])
        return super().parse_args(ctx, args)


def _said(name: str) -> bool:
    """The option is on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _bad(option: str, problem: str) -> click.BadParameter:
    return click.BadParameter(problem, param_hint=f"'{option}'")


def _campaign(row: Campaign, given: dict[str, Any]) -> Campaign:
    """The row with what was said of it."""
    wanted = _load(row, given)
    order = dataclasses.replace(
        row.order, **{name: given[name] for name in ("mode", "target", "duration", "every") if name in given}
    )
    when = _when(wanted, given)
    if row.isolated and not given["loss"]:
        raise _bad("--loss", "nothing would be lost")
    choices = _choices(row, given)
    moves = row.moves if choices.loss == 1 else None  # TCP bears some loss
    return dataclasses.replace(row, load=wanted, order=order, when=when, choices=choices, moves=moves)


def _when(wanted: Load, given: dict[str, Any]) -> When:
    counted = _said("after_streams") or _said("after_tokens")
    if counted and _said("at"):
        raise _bad("--at", "either this, or --after-streams and --after-tokens")
    when = When(streams=given["after_streams"], tokens=given["after_tokens"], at=None if counted else given["at"])
    if when.at is not None:
        return when
    if wanted.requests is None and when.streams is None:
        raise _bad("--after-streams", "a load without end needs a number")
    if wanted.requests is not None and (when.streams or 1) > wanted.streams:
        raise _bad("--after-streams", f"only {wanted.streams} of {wanted.requests} requests are streams (--sse)")
    if when.tokens > wanted.tokens.low:
        raise _bad("--after-tokens", f"answers may end at token {wanted.tokens.low:g} (--tokens)")
    return when


def _choices(row: Campaign, given: dict[str, Any]) -> Choices:
    said = {name: given[name] for name in row.options}
    if "signal" in said:
        said["signal"] = DEADLY[said["signal"]]
    return dataclasses.replace(row.choices, **said)


def _load(row: Campaign, given: dict[str, Any]) -> Load:
    names = {field.name for field in dataclasses.fields(Load)}
    wanted = dataclasses.replace(row.load, **{name: given[name] for name in given if name in names})
    if wanted.users and wanted.sse and not set(wanted.users) & set(STREAMING):
        raise _bad("--user", f"{wanted.users[0]} sends no streams; say --sse 0, or add one of {', '.join(STREAMING)}")
    for option, numbers, least in (("--tokens", wanted.tokens, 1), ("--prompt", wanted.prompt, SHORTEST)):
        if numbers.low < least:
            raise _bad(option, f"at least {least}")
        if not (numbers.low.is_integer() and numbers.high.is_integer()):
            raise _bad(option, f"{numbers} are no whole numbers")
    return wanted


def _setup(campaign: Campaign, given: dict[str, Any]) -> Setup:
    attached = _attached(campaign, given)
    cmd = tuple(given["engine_cmd"] or ())
    if given["engine_cmd"] == []:
        raise _bad("--engine-cmd", "it is empty")
    if cmd and attached:
        raise _bad("--engine-cmd", "either this or --attach")
    if given["engine_flags"] and (cmd or attached):
        raise _bad("--engine-flag", "is for mock workers only")
    if cmd and not any("{port}" in word for word in cmd):
        raise _bad("--engine-cmd", "nothing in it says {port}")
    if cmd and campaign.isolated and not any("{host}" in word for word in cmd):
        raise _bad("--engine-cmd", "nothing in it says {host}, and the engine gets an address of its own")
    relay = (*campaign.relay, *chain(*given["relay_flags"]))
    mock = (*TICK, *chain(*given["engine_flags"]))
    count = len(attached) or given["workers"]
    try:
        campaign.order.mode.count(count)
    except ValueError as error:
        raise _bad("--mode", str(error)) from None
    if campaign.order.target not in ("busiest", "idlest", "random"):
        started = SIDECAR if campaign.beside == "sidecar" else WORKER
        own = [started.format(number) for number in range(count)]
        names = own if campaign.beside == "sidecar" else [engine.name for engine in attached] or own
        if campaign.order.target not in names:
            raise _bad("--target", f"{campaign.order.target!r} is none of busiest, idlest, random, {', '.join(names)}")
    _check_processes(attached)
    return Setup(
        mock=mock,
        oracle=None if cmd or attached else _oracle(mock),
        command=cmd,
        attached=attached,
        workers=count,
        relay=relay,
        config=_config(relay),
        seed=given["seed"],
        patience=given["patience"],
        said=click.get_current_context().meta[_WORDS],
    )


def _attached(campaign: Campaign, given: dict[str, Any]) -> tuple[Attached, ...]:
    urls, pids = given["attached"], given["pids"]
    if len(urls) != len(pids):
        raise _bad("--pid", f"{len(pids)} of them for {len(urls)} --attach")
    if urls and len(urls) < 2:
        raise _bad("--attach", "one engine alone cannot be rescued by another; name at least two")
    if urls and campaign.isolated:
        raise _bad("--attach", "a running engine cannot be moved into a network namespace")
    ours = campaign.beside == "sidecar"  # whoever has started the engines
    if urls and campaign.restarts and not ours and campaign.order.duration is not None:
        option = "--duration" if _said("duration") else "--attach"
        raise _bad(option, "an engine that was not started here cannot be started again")
    if urls and _said("workers"):
        raise _bad("--workers", "either this or --attach")
    return tuple(Attached(url, pid) for url, pid in zip(urls, pids, strict=True))


def _check_processes(attached: tuple[Attached, ...]) -> None:
    """Each serves its URL: what gets the signals is the engine, and no other one."""
    for option, named in (("--attach", [each.port for each in attached]), ("--pid", [each.pid for each in attached])):
        if twice := {each for each in named if named.count(each) > 1}:
            raise _bad(option, f"{twice.pop()} is there twice: one engine alone cannot be rescued by another")
    for engine in attached:
        listening = processes.listeners(engine.pid, engine.port)
        if not listening:
            raise _bad("--attach", f"no process of ours listens on port {engine.port}")
        if not set(members(engine)).intersection(listening):
            own, other = (f"process {pid} ({processes.title(pid)})" for pid in (engine.pid, listening[0]))
            raise _bad("--pid", f"{own} does not listen on port {engine.port}; {other} does")


def _config(flags: tuple[str, ...]) -> Config:
    """What the proxy's flags come to."""
    serve = dyn_relay.cli.main.commands["serve"]
    try:
        context = serve.make_context("dyn-relay serve", list(flags))
        said = context.params
        given = {name: value for name, value in said.items() if value not in (None, ()) and name != "config"}
        config = load(given, os.environ, said["config"]).config
    except (click.UsageError, ConfigError) as error:
        raise _bad("--relay-flag", getattr(error, "message", str(error))) from None
    except click.exceptions.Exit:  # --help
        raise _bad("--relay-flag", f"{shlex.join(flags)} serves nothing") from None
    for name in OURS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise _bad("--relay-flag", f"--{name.replace('_', '-')} is the campaign's to say")
    if config.api_key or config.admin_api_key:
        raise _bad("--relay-flag", "the campaign's clients have no key (--api-key, --admin-api-key, or DYN_*)")
    return config


def _oracle(flags: tuple[str, ...]) -> Oracle:
    """Who knows what mock workers with these flags say."""
    try:
        said = dyn_testkit.cli.main.make_context("dyn-mock-worker", list(flags)).params
    except click.UsageError as error:
        raise _bad("--engine-flag", error.format_message()) from None
    except click.exceptions.Exit:  # --help
        raise _bad("--engine-flag", f"{shlex.join(flags)} serves nothing") from None
    return Oracle(
        Model(vocab_size=said["vocab_size"], eos_rate=said["eos_rate"], context_length=said["context_length"]),
        weight_version=said["weight_version"],
        tokenizer=dyn_testkit.cli.tokenizer_of(said["with_tokenizer"], said["tokenizer"]),
        defaults=said["preferred_sampling_params"],
        routed_experts=said["routed_experts"],
        expert_mark=said["expert_mark"],
    )
