"""What is meant for a whole fleet: the paths that every worker is told, and what their answers come to together.

A client of a single engine must find what it looks for: the fields of an engine's own answer, and a 200 only if all
have done it. What each has said comes beside that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dyn_relay.formats.base import Answer
from dyn_relay.http11.errors import error_body
from dyn_relay.relay.orders import Said

#: Seconds for what an engine does between two steps, and for what moves weights or waits until the engine is idle.
QUICK, SLOW = 60.0, 1800.0
PAUSE, CONTINUE, LOADS = "/pause_generation", "/continue_generation", "/v1/loads"


@dataclass(frozen=True, slots=True)
class Order:
    """A row of `ORDERS`: methods as in SGLang 0.5.23."""

    methods: tuple[str, ...] = ("POST",)
    #: Seconds that each worker gets.
    timeout: float = QUICK
    #: It may change what workers tell of themselves, such as the version of their weights.
    renews: bool = False


_EITHER = ("GET", "POST")
#: Paths whose requests go to all workers at once.
ORDERS: Mapping[str, Order] = {
    PAUSE: Order(),
    CONTINUE: Order(),
    "/flush_cache": Order(_EITHER, SLOW),
    "/update_weight_version": Order(renews=True),
    "/update_weights_from_disk": Order(timeout=SLOW, renews=True),
    "/release_memory_occupation": Order(_EITHER, SLOW),
    "/resume_memory_occupation": Order(_EITHER, SLOW),
    "/weights_checker": Order(timeout=SLOW),
    "/load_lora_adapter": Order(timeout=SLOW),
    "/unload_lora_adapter": Order(timeout=SLOW),
    "/clear_hicache_storage_backend": Order(_EITHER),
    "/configure_logging": Order(),
    "/set_internal_state": Order(),
    "/start_profile": Order(_EITHER),
    "/stop_profile": Order(_EITHER, SLOW),
}
#: Paths whose bodies are made for one engine: its rank in a group, its tensors, its handles. Nobody but the client can
#: know which, so these are refused.
ONE_ENGINES = frozenset(
    {
        "/destroy_weights_update_group",
        "/init_weights_update_group",
        "/load_lora_adapter_from_tensors",
        "/pd_role_switch",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
    }
)
_NOBODY = Answer(503, error_body(503, "no worker is in the fleet"))


def done(said: Sequence[Said]) -> Answer:
    """Answers to an order. 200: all have obeyed, and an engine's own fields come with `workers`.

    Else: the engines' status if they agree (a mistake in the body, say), or 502; `success` is false, and `message`
    names who has not obeyed.
    """
    if not said:
        return _NOBODY
    told = [_row(one) for one in said]
    if all(one.ok for one in said):
        return _json(200, {**_fields(said[0]), "workers": told})
    message = _complaint(said)
    return _json(_status(said), {"success": False, "status": "error", "message": message, "workers": told})


def loads(said: Sequence[Said], ignored: frozenset[str]) -> Answer:
    """Answers to `GET /v1/loads`: one of SGLang's shape, whose `loads` say which worker they are of.

    A load that cannot be read must not pass for none: 502, with what each has said. `ignored`: ids of workers that may
    be silent, since nothing listens there.
    """
    if not said:
        return _NOBODY
    bodies: list[dict[str, object]] = []
    rows: list[object] = []
    for one in said:
        body = _fields(one)
        listed = body.get("loads")
        if one.ok and isinstance(listed, list) and all(isinstance(row, dict) for row in listed):
            bodies.append(body)
            rows += [{**row, "worker": one.worker.id, "url": one.worker.url} for row in listed]
        elif not (one.answer is None and one.worker.id in ignored):
            told = [_row(each) for each in said]
            return _json(_status(said), {"success": False, "message": _complaint(said, "loads"), "workers": told})
    counts = [count for body in bodies if isinstance(count := body.get("num_accelerators"), int)]
    whole = {
        "timestamp": max((str(body.get("timestamp", "")) for body in bodies), default=""),
        "version": _common(bodies, "version"),
        "accelerator": _common(bodies, "accelerator"),
        "num_accelerators": sum(counts),
        "loads": rows,
    }
    return _json(200, whole)


def _status(said: Sequence[Said]) -> int:
    """The engines' own, if none has obeyed and all say the same; else 502."""
    statuses = {one.answer.status if one.answer is not None else 0 for one in said}
    [status] = statuses if len(statuses) == 1 else [0]
    return status if status >= 400 else 502


def _complaint(said: Sequence[Said], wanted: str = "") -> str:
    lines = []
    for one in said:
        if one.answer is None:
            lines.append(f"{one.worker.id}: {one.error}")
        elif not one.ok:
            lines.append(f"{one.worker.id}: status {one.answer.status}")
        elif wanted and wanted not in _fields(one):
            lines.append(f"{one.worker.id}: no {wanted} in its answer")
    return f"{len(lines)} of {len(said)} workers: " + "; ".join(lines)


def _row(one: Said) -> dict[str, object]:
    row: dict[str, object] = {"worker": one.worker.id, "url": one.worker.url}
    if one.answer is None:
        return {**row, "status": None, "error": one.error}
    return {**row, "status": one.answer.status, "answer": _read(one.answer.body)}


def _fields(one: Said) -> dict[str, object]:
    """The answer as an object; SGLang answers some orders with a text."""
    if one.answer is None:
        return {}
    value = _read(one.answer.body)
    return value if isinstance(value, dict) else {"success": True, "message": value}


def _read(body: bytes) -> object:
    """JSON, or else a text."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return body.decode("utf-8", "replace").strip()


def _common(bodies: Sequence[Mapping[str, object]], name: str) -> object:
    """What all of them say; null if they differ."""
    values = [body.get(name) for body in bodies]
    return values[0] if values and all(value == values[0] for value in values) else None


def _json(status: int, value: object) -> Answer:
    return Answer(status, msgspec.json.encode(value))
