"""The paths that a backend shows: a table. What is not in it is a 404, whatever the engine would say to it.

Source: the routes of SGLang 0.5.23's `srt/entrypoints/http_server.py`; of what it keeps for its admin, the proxy's own
list (`control/admin.py`), for an order that goes to all workers, and one that is for one engine, come through here.
"""

from __future__ import annotations

from dyn_relay.control.admin import ADMIN
from dyn_relay.relay.queue import GENERATING

GENERATE = "/generate"
#: What an engine's gRPC server does if there is an HTTP one as well.
GENERATION = frozenset({GENERATE, "/abort_request"})
#: What the engine says of itself.
INFOS = frozenset({"/", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/models"})
HEALTH = frozenset({"/health", "/health_generate", "/ready", "/ping"})
LOADS = frozenset({"/v1/loads", "/get_load", "/get_loads", "/metrics"})
TOKENS = frozenset({"/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"})
SESSIONS = frozenset({"/open_session", "/close_session"})

#: All that a stock engine's HTTP server has, by path; `*` stands for the rest of one.
SGLANG = frozenset({GENERATE, "/v1/models/*"}) | INFOS | HEALTH | LOADS | TOKENS | SESSIONS | GENERATING | ADMIN


def shown(path: str, table: frozenset[str]) -> bool:
    """Is it one of them? A slash at its end does not count."""
    path = path.rstrip("/") or "/"
    return path in table or any(path.startswith(one[:-1]) for one in table if one.endswith("*"))
