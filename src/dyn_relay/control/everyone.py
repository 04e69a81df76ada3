"""What is meant for a whole fleet, and said to every worker: what their answers come to together.

A client of a single engine must find what it looks for: the fields of an engine's own answer, and a 200 only if all
have done it. What each has said comes beside that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from dyn_relay.formats.base import Answer
from dyn_relay.http11.errors import error_body
from dyn_relay.relay.orders import Said

LOADS = "/v1/loads"
#: Seconds that each worker gets for them: whoever balances or drains by them asks again soon.
LOADS_TIMEOUT = 10.0
_NOBODY = Answer(503, error_body(503, "no worker is in the fleet"))


def done(said: Sequence[Said]) -> Answer:
    """Answers to an order. 200: all have obeyed; `success` is true, and what an engine's answer has comes with it.

    A field on which they do not agree is null there; `workers` has what each said. Else: the engines' status if they
    agree (a mistake in the body, say), or 502; `success` is false, and `message` names who has not obeyed.
    """
    if not said:
        return _NOBODY
    told = [_row(one) for one in said]
    if all(one.ok for one in said):
        bodies = [_fields(one) for one in said]
        names = dict.fromkeys(name for body in bodies for name in body)
        common = {name: _common(bodies, name) for name in names}
        return Answer.of(200, {**common, "success": True, "workers": told})
    message = _complaint(said, _disobedient)
    return Answer.of(_status(said), {"success": False, "status": "error", "message": message, "workers": told})


def loads(said: Sequence[Said], ignored: frozenset[str]) -> Answer:
    """Answers to `GET /v1/loads`: one of SGLang's shape, whose `loads` say which worker they are of.

    A load that cannot be read must not pass for none: 502, with what each has said. `ignored`: ids of workers that may
    be silent, since nothing listens there.
    """
    if not said:
        return _NOBODY
    heard = [one for one in said if one.answer is not None or one.worker.id not in ignored]
    if any(_unreadable(one) for one in heard):
        told = [_row(one) for one in said]
        return Answer.of(_status(heard), {"success": False, "message": _complaint(heard, _unreadable), "workers": told})
    bodies = [_fields(one) for one in heard]
    rows = [
        {**row, "worker": one.worker.id, "url": one.worker.url}
        for one, body in zip(heard, bodies, strict=True)
        for row in msgspec.convert(body["loads"], list[dict[str, object]])
    ]
    counts = [count for body in bodies if isinstance(count := body.get("num_accelerators"), int)]
    whole = {
        "timestamp": max((str(body.get("timestamp", "")) for body in bodies), default=""),
        "version": _common(bodies, "version"),
        "accelerator": _common(bodies, "accelerator"),
        "num_accelerators": sum(counts),
        "loads": rows,
    }
    return Answer.of(200, whole)


def _status(said: Sequence[Said]) -> int:
    """The engines' own, if none has obeyed and all say the same; else 502."""
    statuses = {one.answer.status if one.answer is not None else 0 for one in said}
    [status] = statuses if len(statuses) == 1 else [0]
    return status if status >= 400 else 502


def _complaint(said: Sequence[Said], fault: Callable[[Said], str]) -> str:
    lines = [f"{one.worker.id}: {what}" for one in said if (what := fault(one))]
    return f"{len(lines)} of {len(said)} workers: " + "; ".join(lines)


def _disobedient(one: Said) -> str:
    """Why an order was not obeyed; empty if it was."""
    if one.answer is None:
        return one.error
    if not 200 <= one.answer.status < 300:
        return f"status {one.answer.status}"
    return "" if one.ok else f"status {one.answer.status}, but its answer says that it was not done"


def _unreadable(one: Said) -> str:
    """Why its loads cannot be read; empty if they can."""
    if not one.ok:
        return _disobedient(one)
    body = _fields(one)
    if "loads" not in body:
        return "no loads in its answer"
    listed = body["loads"]
    if not isinstance(listed, list):
        return "its loads are no list"
    return "" if all(isinstance(row, dict) for row in listed) else "one of its loads is no object"


def _row(one: Said) -> dict[str, object]:
    row: dict[str, object] = {"worker": one.worker.id, "url": one.worker.url}
    if one.answer is None:
        return {**row, "status": None, "error": one.error}
    return {**row, "status": one.answer.status, "answer": one.value}


def _fields(one: Said) -> dict[str, object]:
    """The answer as an object; SGLang answers some orders with a text, a list, or null."""
    return one.value if isinstance(one.value, dict) else {"message": one.value}


def _common(bodies: Sequence[Mapping[str, object]], name: str) -> object:
    """What all of them say; null if they differ."""
    values = [body.get(name) for body in bodies]
    return values[0] if values and all(value == values[0] for value in values) else None
