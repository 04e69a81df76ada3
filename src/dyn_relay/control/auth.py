"""Who may ask for what: SGLang's levels (0.5.23, `srt/utils/auth.py`), so that its clients need no change."""

from __future__ import annotations

import hmac
import posixpath
from functools import lru_cache
from urllib.parse import unquote

from dyn_relay.config import Config
from dyn_relay.control.admin import ADMIN
from dyn_relay.formats.base import Answer
from dyn_relay.http11.headers import get
from dyn_relay.http11.server import Request

#: Open to everybody: probes and scrapers carry no keys.
OPEN = frozenset({"/health", "/health_generate", "/ready", "/liveness", "/readiness", "/metrics"})
UNAUTHORIZED = Answer(401, b'{"error":"Unauthorized"}')


@lru_cache(maxsize=128)
def canonical(path: str) -> str:
    """The path as the most obliging server would read it: percent-decoded, without dot or empty segments."""
    return posixpath.normpath("/" + unquote(path).lstrip("/"))


def refusal(request: Request, config: Config, *, admin: bool) -> Answer | None:
    """The answer to a request without the right key; None if it may pass.

    With --admin-api-key, `admin` endpoints take that key and no other.
    """
    path = request.path.rstrip("/")
    admin = admin or canonical(path) in ADMIN
    key = config.admin_api_key if admin and config.admin_api_key else config.api_key
    if key is None or request.method == "OPTIONS" or path in OPEN:
        return None
    scheme, _, given = (get(request.headers, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode()):
        return None
    return UNAUTHORIZED
