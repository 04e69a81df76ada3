"""Every option of the proxy: one table, three sources (flag > environment > TOML file), one frozen value.

The table is the `Config` class itself (`table.py`): each field carries its section, bounds and help. The command line,
the environment's names, the file's keys and `docs/configuration.md` (`python -m dyn_relay.config`) are derived from it.
"""

from dyn_relay.config.load import CONFIG_ENV, Loaded, load, merge
from dyn_relay.config.option import ConfigError, Option, option, options_of
from dyn_relay.config.table import OPTIONS, Config, LogLevel, OnAbort, Policy, sections

__all__ = [
    "CONFIG_ENV",
    "OPTIONS",
    "Config",
    "ConfigError",
    "Loaded",
    "LogLevel",
    "OnAbort",
    "Option",
    "Policy",
    "load",
    "merge",
    "option",
    "options_of",
    "sections",
]
