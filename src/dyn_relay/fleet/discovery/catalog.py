"""The sources that a configuration asks for."""

from __future__ import annotations

from dyn_relay.config import Config
from dyn_relay.fleet.discovery.base import Source
from dyn_relay.fleet.discovery.dns import ResolvedName
from dyn_relay.fleet.discovery.file import WatchedFile
from dyn_relay.fleet.discovery.static import Static
from dyn_relay.fleet.stage import configured


def sources(config: Config) -> list[Source]:
    """All of them at once, if several are configured. Raises `ImportError` if Kubernetes' extra is not installed."""
    found: list[Source] = [Static(configured(config))]
    if config.discovery_file:
        found.append(WatchedFile(config.discovery_file, config.discovery_interval_secs))
    if config.discovery_dns:
        found.append(ResolvedName(config.discovery_dns, config.discovery_interval_secs))
    if config.service_discovery:
        from dyn_relay.fleet.discovery.kubernetes import Pods  # late: it needs the extra

        found.append(Pods(config.selector, config.service_discovery_namespace, config.service_discovery_port))
    return found
