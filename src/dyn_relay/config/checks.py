"""What a value must be, beyond its type and bounds: each raises `ValueError` with the words for the user."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from dyn_relay.http11.origin import Origin


def is_path(value: object) -> None:
    """A path of a URL."""
    if not str(value).startswith("/") or not all(0x21 <= ord(character) <= 0x7E for character in str(value)):
        raise ValueError("must begin with /, and be printable ASCII without blanks")
    if "#" in str(value):
        raise ValueError("must not have a #: nothing behind it would be sent")


def is_host(value: object) -> None:
    """An address to listen on."""
    if not str(value).strip():
        raise ValueError("must not be empty: that would be every address of this machine; say 0.0.0.0 if you mean it")


def is_key(value: object) -> None:
    """What can be sent as a bearer token; None: no key."""
    if value is not None and not (str(value) and all(0x21 <= ord(character) <= 0x7E for character in str(value))):
        raise ValueError("must be printable ASCII without blanks or line ends")


def is_format(value: object) -> None:
    """The name of a format that is installed and can be loaded."""
    from dyn_relay.formats import catalog  # late, as below

    catalog.load(str(value))


def is_weight_policy(value: object) -> None:
    """A value of `--weight-version-policy`."""
    from dyn_relay.formats.weights import WeightPolicy  # late, as below

    WeightPolicy(str(value))


def are_urls(value: object) -> None:
    """Workers' URLs."""
    if not value:
        return
    from dyn_relay.http11.client import Origin  # late: `--help` needs no network code

    for url in cast("tuple[str, ...]", value):
        Origin.parse(url)


#: Stands for no port behind a URL, as SMG's users type it.
NO_PORT = "none"


def urls_and_ports(items: Iterable[str]) -> list[tuple[Origin, int | None]]:
    """URLs, each with the port behind it, if there is one. Raises `ValueError`."""
    from dyn_relay.http11.origin import Origin  # late, as above

    found: list[tuple[Origin, int | None]] = []
    after_url = False
    for item in items:
        number = item.isascii() and item.isdigit()
        if number or item.lower() == NO_PORT:
            if not after_url or (number and not 0 < int(item) < 65536):
                raise ValueError(f"{item}: must be a port behind a URL")
            found[-1] = found[-1][0], int(item) if number else None
            after_url = False
        else:
            found.append((Origin.parse(item), None))
            after_url = True
    return found


def are_urls_and_ports(value: object) -> None:
    """URLs, each with a port behind it or none, and no URL with two."""
    ports: dict[Origin, int | None] = {}
    for origin, port in urls_and_ports(cast("tuple[str, ...]", value)):
        if ports.setdefault(origin, port) != port:
            both = " and ".join(f"--prefill {origin} {one or NO_PORT}" for one in (ports[origin], port))
            raise ValueError(f"{origin} is named with two ports, by {both}")


def are_apart(prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
    """No URL is named for both roles."""
    from dyn_relay.http11.origin import Origin  # late, as above

    prompts = {origin for origin, _ in urls_and_ports(prefill)}
    for url in decode:
        if Origin.parse(url) in prompts:
            raise ValueError(f"{url} is named by both --prefill and --decode; a worker is for one of them")


def are_grpc(named: tuple[str, ...]) -> None:
    """All URLs are those of gRPC servers."""
    for origin, _ in urls_and_ports(named):
        if not origin.grpc:
            raise ValueError(f"{origin} is no gRPC server's URL, which begins with grpc:// or grpcs://")


def are_names(value: object) -> None:
    """Headers' names."""
    for name in cast("tuple[str, ...]", value):
        if not all(character.isascii() and (character.isalnum() or character in "-_.") for character in name):
            raise ValueError(f"{name!r} is no header's name")


def is_name_and_port(value: object) -> None:
    """ "name:port"; None: neither."""
    if value is None:
        return
    from dyn_relay.http11.origin import Origin  # late, as above

    if not re.fullmatch(r"[^/]+:[0-9]+", str(value)):
        raise ValueError("must be NAME:PORT")
    Origin.parse(f"http://{value}")


def is_namespace(value: object) -> None:
    """A namespace of Kubernetes; None: all of them."""
    if value is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", str(value)):
        raise ValueError("must be the name of a namespace: lower-case letters, digits and hyphens")


def are_labels(value: object) -> None:
    """Labels of Kubernetes, as a selector has them."""
    for label in cast("tuple[str, ...]", value):
        if not re.fullmatch(r"([\w.-]+/)?[\w.-]+=[\w.-]*", label, re.ASCII):
            raise ValueError(f"{label!r}: must be KEY=VALUE, a label of the pods")


def can_ask_kubernetes(value: object) -> None:
    """What that needs is installed."""
    if value and importlib.util.find_spec("lightkube") is None:
        raise ValueError("needs an extra: pip install 'dyn-relay[kubernetes]'")
