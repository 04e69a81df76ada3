"""Which of a client's headers travel to a worker."""

from __future__ import annotations

from dyn_relay.config import Config
from dyn_relay.http11.headers import Headers, end_to_end

#: Ours to set, or of no meaning one hop further on.
_OURS = frozenset({b"host", b"content-length", b"content-type", b"expect"})
#: SGLang 0.5.23 with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES lets these replace fields of the body, the rid among them:
#: a continuation would run under the name of the attempt that it replaces.
_OVERRIDES = b"x-override-"


def to_worker(headers: Headers, config: Config) -> Headers:
    """The client's end-to-end headers for a worker, with exactly one `authorization`, or none.

    The client's credential is for this proxy; it travels on only with --forward-authorization, and then instead of the
    worker's key.
    """
    kept = [
        (name, value) for name, value in end_to_end(headers) if name not in _OURS and not name.startswith(_OVERRIDES)
    ]
    given = any(name == b"authorization" for name, _ in kept)
    if config.forward_authorization and given:
        return kept
    if config.worker_api_key:
        kept = [pair for pair in kept if pair[0] != b"authorization"]
        return [*kept, (b"authorization", b"Bearer " + config.worker_api_key.encode())]
    return [pair for pair in kept if pair[0] != b"authorization"]


def native_headers(headers: Headers) -> Headers:
    """Of `to_worker`'s, those for a request whose answer is read here: no compressed answers."""
    return [pair for pair in headers if pair[0] != b"accept-encoding"]
