"""What of a body tells where its request should go: its sequence, its session, and the rank that it asks for."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

import msgspec

from dyn_relay.formats.sglang.request import ABSENT, Request
from dyn_relay.formats.sglang.wire import NULL, Foreign, NotJson, read_rows

#: What separates sequences of the same ids in SGLang's radix cache (0.5.23, `extra_key` and what is put into it).
_SPACES = ("lora_path", "extra_key", "cache_salt")
#: Fields that name a session, the most explicit first.
_SESSIONS = ("routing_key", "session_id", "conversation_id")
#: What turns and retries of a session add to its rid, as SMG reads them: `s`, `s_t1`, and `s_t2_r1` are one.
_TURN = re.compile(r"(_t\d+)?(_r\d+)?\Z")

_text = msgspec.json.Decoder(str)
_ids = msgspec.json.Decoder(list[int])


def pinned(request: Request) -> int | None:
    """The data-parallel rank that it asks for; -1 for what can be none, None for any.

    `data_parallel_rank` counts if the new name is missing or null (SGLang 0.5.23, `GenerateReqInput`).
    """
    for name in ("routed_dp_rank", "data_parallel_rank"):
        value = request.value(name)
        if value is not ABSENT and value is not None:
            return value if type(value) is int and value >= 0 else -1
    return None


def session(request: Request) -> str:
    """What its client calls the session that it belongs to; its rid, without turn and retry, if it says no more."""
    for name in _SESSIONS:
        value = request.value(name)
        if isinstance(value, str) and value:
            return value
    inner = request.value("session_params")
    if isinstance(inner, dict) and isinstance(inner.get("id"), str) and inner["id"]:
        return str(inner["id"])
    return _TURN.sub("", request.rid) or request.rid if request.rid else ""


def cache_space(request: Request) -> bytes:
    """Equal for two requests whose equal prefixes are one to the cache."""
    given = [(at, request.fields[name]) for at, name in enumerate(_SPACES) if name in request.fields]
    return b"".join([b"%d:%b;" % (at, bytes(value)) for at, value in given if value != NULL])


def prefix(request: Request, delivered: array[int]) -> Sequence[int] | str | None:
    """Prompt and delivered ids, or the text of a prompt whose ids are not known; of a batch, its first prompt's."""
    try:
        if request.prompt is not None:
            found = array("I", _ids.decode(request.prompt))
            found.extend(delivered)
            return found
        if request.by_text:
            return _text.decode(request.fields["text"])
        if request.fields.get("input_ids", NULL) != NULL:
            return array("I", _ids.decode(read_rows(request.fields["input_ids"])[0]))
        return _text.decode(read_rows(request.fields["text"])[0])
    except (msgspec.DecodeError, Foreign, NotJson, OverflowError, IndexError, KeyError):
        return None
