"""What a request to the proxy's own endpoints says: a worker's URL, its part, times. In the query or in the body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from dyn_relay.fleet.worker import Role
from dyn_relay.http11.origin import Origin
from dyn_relay.http11.server import Request

#: Names of a worker's URL in a body.
URLS = ("url", "worker_url")


class BadInput(Exception):
    """The request cannot be understood; the message names the field."""


def url_of(request: Request) -> str:
    """The worker's URL: `?url=`, `url` or `worker_url` in the body, or the same in several. Raises `BadInput`."""
    named: list[object] = [*parse_qs(request.query).get("url", [])]
    fields = fields_of(request)
    named += [fields[field] for field in URLS if field in fields]
    if not named or not all(isinstance(url, str) and url for url in named):
        raise BadInput("url: a worker's URL is needed")
    if any(url != named[0] for url in named):
        raise BadInput(f"url: {' and '.join(map(repr, named))} are different workers")
    return str(named[0])


def origin_of(url: str) -> Origin:
    """Raises `BadInput`."""
    try:
        return Origin.parse(url)
    except ValueError as exc:
        raise BadInput(f"url: {exc}") from None


def only_url_of(request: Request) -> str:
    """The same, of a request that may set nothing else but its part, see `part_of`."""
    nothing_but(request, ("url", *PART), (*URLS, *PART), "nothing of a worker can be set but its url and its part")
    return url_of(request)


def nothing_but(request: Request, query: Sequence[str], body: Sequence[str], why: str) -> None:
    """Raises `BadInput` for any other name in the query or in the body."""
    asked = [name for name in parse_qs(request.query, keep_blank_values=True) if name not in query]
    for name in (*asked, *(field for field in fields_of(request) if field not in body)):
        raise BadInput(f"{name}: {why}")


#: Under the names that SMG has for them.
PART = ("worker_type", "bootstrap_port")
#: Of a worker that names itself.
LEASE = ("lease_secs", "after", "instance")


def part_of(request: Request) -> tuple[Role | None, int | None]:
    """A worker's role and bootstrap port: `worker_type` and `bootstrap_port`, in the query or the body, or in both.

    Raises `BadInput`.
    """
    kind, port = said(request, "worker_type"), said(request, "bootstrap_port")
    if kind is not None and kind not in list(Role):
        raise BadInput(f"worker_type: must be one of {', '.join(Role)}")
    if port is not None and not (type(port) is int and 0 < port < 65536):
        raise BadInput("bootstrap_port: must be a port")
    return (None if kind is None else Role(kind)), port


def seconds_of(request: Request, name: str, most: float) -> float | None:
    """A number of seconds in the query or the body, if it is there. Raises `BadInput`."""
    value = said(request, name)
    if value is not None and not (type(value) in (int, float) and 0 <= value <= most):
        limit = f" of at most {most:g}" if most < math.inf else ""
        raise BadInput(f"{name}: must be a number of seconds{limit}")
    return None if value is None else float(value)


def instance_of(request: Request) -> str:
    """Which process names the worker; "" if it does not say. Raises `BadInput`."""
    value = said(request, "instance")
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= 128):
        raise BadInput("instance: must be a string of 1 to 128 characters")
    return value or ""


def said(request: Request, name: str) -> Any:
    """A field of the query or the body, None if it is in neither; digits of a query are a number."""
    asked: list[Any] = parse_qs(request.query, keep_blank_values=True).get(name, [])
    values = [int(one) if one.isascii() and one.isdigit() and len(one) < 10 else one for one in asked]
    fields = fields_of(request) if request.body else {}
    values += [fields[name]] if fields.get(name) is not None else []
    if any(value != values[0] for value in values):
        raise BadInput(f"{name}: {' and '.join(map(repr, values))} are different")
    return values[0] if values else None


def fields_of(request: Request) -> dict[str, Any]:
    """The body, an object; of an empty one, none. Raises `BadInput`."""
    try:
        return msgspec.json.decode(request.body or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise BadInput(f"body: {exc}") from None
