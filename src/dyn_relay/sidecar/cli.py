"""The command line of `dyn-sidecar`. Its flags come from the table in `settings.py`."""

from __future__ import annotations

import os
from typing import Any, cast

import click

from dyn_relay.cli import flag_of, given
from dyn_relay.config import ConfigError, merge
from dyn_relay.sidecar.settings import OPTIONS, Settings


def _run(**flags: object) -> None:
    """Show the engine at --engine to proxies at --relay until SIGTERM: withdraw, drain, end. A second signal ends."""
    try:
        values, _ = merge(OPTIONS, given(flags), os.environ)
        settings = Settings(**cast("dict[str, Any]", values))
    except ConfigError as exc:
        raise click.UsageError(str(exc)) from None
    import trio

    from dyn_relay.sidecar.process import run

    raise SystemExit(trio.run(run, settings))


main = click.version_option(package_name="dyn-relay", message="%(prog)s %(version)s")(
    click.Command(
        "dyn-sidecar",
        callback=_run,
        params=[*map(flag_of, OPTIONS)],
        help=_run.__doc__,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
)
