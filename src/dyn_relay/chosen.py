"""The format that a configuration chooses."""

from __future__ import annotations

from dyn_relay.config import Config
from dyn_relay.formats import catalog
from dyn_relay.formats.base import Format

#: The name of the one that is ours.
BUILT_IN = "sglang"


def format_of(config: Config) -> Format:
    """Made with its options. Raises `ValueError`, which says whose it is, if it cannot be."""
    return catalog.make(
        config.format,
        config.on_abort,
        config.weight_version_policy,
        tell_recomputed_rows=config.tell_recomputed_rows,
        pd_disaggregation=config.pd_disaggregation,
        trust_client_bootstrap=config.trust_client_bootstrap,
    )
