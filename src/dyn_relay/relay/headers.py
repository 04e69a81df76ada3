"""Which of a client's headers travel to a worker."""

from __future__ import annotations

from dyn_relay.config import Config
from dyn_relay.http11.headers import Headers, end_to_end, get

#: Ours to set, or of no meaning one hop further on.
_OURS = frozenset({b"host", b"content-length", b"content-type", b"expect"})
_OURS_ALONE = _OURS | {b"authorization"}
#: SGLang 0.5.23 with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES lets these replace fields of the body, the rid among them:
#: a continuation would run under the name of the attempt that it replaces.
_OVERRIDES = b"x-override-"


def to_worker(headers: Headers, config: Config, *, native: bool = False) -> Headers:
    """The client's end-to-end headers for a worker, with exactly one `authorization`, or none.

    The client's credential is for this proxy; it travels on only with --forward-authorization, and then instead of the
    worker's key. `native`: the answer is read here, so that it must not be compressed.
    """
    travelling = end_to_end(headers)
    forwarded = config.forward_authorization and get(travelling, b"authorization") is not None
    ours = _OURS if forwarded else _OURS_ALONE
    kept = [
        pair
        for pair in travelling
        if pair[0] not in ours and not pair[0].startswith(_OVERRIDES) and not (native and pair[0] == b"accept-encoding")
    ]
    if config.worker_api_key and not forwarded:
        kept.append((b"authorization", b"Bearer " + config.worker_api_key.encode()))
    return kept
