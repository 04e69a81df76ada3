"""The command line. Its flags come from the table in `config.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import click

from dyn_relay.config import CONFIG_ENV, OPTIONS, ConfigError, Loaded, Option, load, sections

_MANY = {option.flag for option in OPTIONS if option.many}


class _OptionsCommand(click.Command):
    """A command with every option of the table: help by section, and `--worker-urls URL URL` as SMG's users type it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, spread(args))
        except click.BadOptionUsage as exc:
            exc.ctx = ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for section, options in sections().items():
            with formatter.section(section):
                formatter.write_dl([row for option in options if (row := rows.pop(option.name, None))])
        with formatter.section("Other"):
            formatter.write_dl([row for row in rows.values() if row])


def spread(args: list[str]) -> list[str]:
    """Repeat a flag that takes several values before each of them: `--worker-urls A B` becomes two flags.

    Raises `click.BadOptionUsage` for one without any: click would take the next flag for its value.
    """
    spelled: list[str] = []
    many = ""
    bare = False
    for arg in [*args, "-"]:
        if arg.startswith("-"):
            if bare:
                raise click.BadOptionUsage(many, f"Option {many!r} requires an argument.")
            flag, sign, value = arg.partition("=")
            many = flag if flag in _MANY else ""
            bare = bool(many) and not sign
            spelled += [arg] if not many else [flag, value] if sign else []
        else:
            spelled += [many, arg] if many else [arg]
            bare = False
    return spelled[:-1]


def flag_of(option: Option) -> click.Option:
    """The flag of a row."""
    default = option.show(option.default)
    text = option.help + (f"  [{'|'.join(option.choices)}]" if option.choices else "")
    text += f"  [{option.env}{f'; default: {default}' if default else ''}]"
    if option.switch:
        return click.Option([f"{option.flag}/--no-{option.flag[2:]}"], is_flag=True, default=None, help=text)
    metavar = option.metavar or option.kind.metavar
    return click.Option([option.flag], multiple=option.many, default=None, metavar=metavar, help=text)


def given(flags: Mapping[str, object]) -> dict[str, object]:
    """Those that were."""
    return {name: value for name, value in flags.items() if value not in (None, ())}


def _with_options(run: Callable[[Loaded], None], name: str, text: str) -> click.Command:
    def callback(config: str | None, **flags: object) -> None:
        try:
            loaded = load(given(flags), os.environ, config)
        except ConfigError as exc:
            raise click.UsageError(str(exc)) from None
        _try_format(loaded)
        run(loaded)

    file = click.Option(["--config"], metavar="FILE", default=None, help=f"A TOML file.  [{CONFIG_ENV}]")
    return _OptionsCommand(name, callback=callback, params=[*map(flag_of, OPTIONS), file], help=text)


def _try_format(loaded: Loaded) -> None:
    """Make it once, before anything listens or is forked: it may be somebody else's."""
    from dyn_relay.chosen import format_of

    try:
        format_of(loaded.config)
    except ValueError as exc:
        raise click.UsageError(f"format: {exc} (from {loaded.origins['format']})") from None


def _serve(loaded: Loaded) -> None:
    if loaded.config.processes > 1:
        from dyn_relay.supervisor import supervise

        raise SystemExit(supervise(loaded.config))
    import trio

    from dyn_relay.app import run

    raise SystemExit(trio.run(run, loaded.config))


def _check(loaded: Loaded) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("option", "value", "from")
    for option in OPTIONS:
        table.add_row(option.name, option.show(getattr(loaded.config, option.name)), loaded.origins[option.name])
    Console().print(table, markup=False)


#: The proxy's own options that make a difference to what is explained.
_JUDGING = ("migration_limit", "migration_max_seq_len", "split_batches", "weight_version_policy", "http_fallback")


def _explain(body: str, worker: str | None, after: int, as_json: bool, config: str | None, **flags: object) -> None:
    """Tell what would become of the request in the file BODY ("-": standard input), without sending it.

    The verdict, the field that decides, and what another worker would get after some tokens. Without --worker it is
    judged for a stock SGLang 0.5.23.
    """
    from pathlib import Path

    import msgspec

    from dyn_relay.explain import Unanswered, run, text

    path = Path("/dev/stdin" if body == "-" else body)
    try:
        found = run(path, worker, after, load(given(flags), os.environ, config).config)
    except OSError as exc:
        raise click.UsageError(f"body: cannot read {body}: {exc.strerror}") from None
    except ValueError as exc:  # ConfigError is one
        raise click.UsageError(str(exc)) from None
    except Unanswered as exc:
        raise click.ClickException(str(exc)) from None
    click.echo(msgspec.json.format(msgspec.json.encode(found)) if as_json else text(found))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dyn-relay", message="%(prog)s %(version)s")
def main() -> None:
    """A proxy in front of SGLang workers: generations outlive the worker that began them."""


main.add_command(_with_options(_serve, "serve", "Serve until SIGTERM."))
main.add_command(_with_options(_check, "check", "Print the effective configuration and where each value came from."))
main.add_command(
    click.Command(
        "explain",
        callback=_explain,
        help=_explain.__doc__,
        params=[
            click.Argument(["body"], metavar="BODY"),
            click.Option(["--worker"], metavar="URL", help="Ask this worker's infos, and judge the request for it."),
            click.Option(
                ["--after"], metavar="K", type=int, default=1, show_default=True, help="Tokens until the cut."
            ),
            click.Option(["--json", "as_json"], is_flag=True, help="Print a JSON object."),
            *(flag_of(option) for option in OPTIONS if option.name in _JUDGING),
            click.Option(["--config"], metavar="FILE", help=f"A TOML file of the proxy's options.  [{CONFIG_ENV}]"),
        ],
    )
)
