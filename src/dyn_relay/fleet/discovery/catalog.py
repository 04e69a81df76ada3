"""The sources that a configuration asks for."""

from __future__ import annotations

from dyn_relay.config import Config
from dyn_relay.fleet.discovery.base import Source
from dyn_relay.fleet.discovery.dns import ResolvedName
from dyn_relay.fleet.discovery.file import WatchedFile
from dyn_relay.fleet.discovery.static import Static
from dyn_relay.fleet.worker import Role


def sources(config: Config) -> list[Source]:
    """All of them at once, if several are configured. Raises `ImportError` if Kubernetes' extra is not installed."""
    if config.pd_disaggregation:
        return [Static(config.prefill, "prefill", Role.PREFILL), Static(config.decode, "decode", Role.DECODE)]
    found: list[Source] = [Static(config.worker_urls)]
    if config.discovery_file:
        found.append(WatchedFile(config.discovery_file, config.discovery_interval_secs))
    if config.discovery_dns:
        found.append(ResolvedName(config.discovery_dns, config.discovery_interval_secs))
    if config.service_discovery:
        from dyn_relay.fleet.discovery.kubernetes import Pods  # late: it needs the extra

        found.append(Pods(config.selector, config.service_discovery_namespace, config.service_discovery_port))
    return found
