"""What becomes of the answers that all processes of a proxy give to one request; a proxy of one has one answer.

Each takes them with this process's own first, and only those that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dyn_relay.control.endpoints import PROCESS_HEADER, Endpoints, abort_of
from dyn_relay.fleet.worker import State
from dyn_relay.formats.base import Answer
from dyn_relay.http11.errors import error_body
from dyn_relay.http11.headers import get
from dyn_relay.http11.server import Request
from dyn_relay.observe.metrics import CONTENT_TYPE

#: Of what a worker does for each process, the sum is what it does for the proxy.
SUMMED = ("load", "in_flight", "served", "failures")


def agreed(endpoints: Endpoints, request: Request, answers: Sequence[Answer]) -> Answer:
    """What all say; whoever does not know a worker is not asked to be sorry for it. 409 if they are at odds."""
    done = [answer for answer in answers if answer.status < 400]
    refused = [answer for answer in answers if answer.status >= 400 and answer.status != 404]
    if done and refused:
        why = refused[0].body.decode(errors="replace")
        return _at_odds(f"{len(refused)} of {len(answers)} refuse what others have done ({why})")
    roles = {str(_role(msgspec.json.decode(answer.body))) for answer in done}
    if len(roles) > 1:
        return _at_odds(f"the worker is for {' or '.join(sorted(roles))}, as they see it")
    return done[0] if done else answers[0]


def _at_odds(how: str) -> Answer:
    message = f"the processes of this proxy are at odds: {how}. Let the worker leave (DELETE), and add it again"
    return Answer(409, error_body(409, message))


def listed(endpoints: Endpoints, request: Request, answers: Sequence[Answer]) -> Answer:
    """One list of workers, as this process sees them, with what they do for all."""
    if len(answers) == 1:
        return answers[0]
    pages = [msgspec.json.decode(answer.body) for answer in answers if answer.status == 200]
    paused = any(page["paused"] for page in pages)
    body = {"workers": _added([page["workers"] for page in pages]), "paused": paused}
    return Answer.of(answers[0].status, body)


def described(endpoints: Endpoints, request: Request, answers: Sequence[Answer]) -> Answer:
    """One worker, likewise."""
    said = [answer for answer in answers if answer.status in (200, 404)]
    lists = [[msgspec.json.decode(answer.body)] if answer.status == 200 else [] for answer in said]
    if len(answers) == 1 or not any(lists):
        return answers[0]
    [worker] = _added(lists)
    return Answer.of(200, worker)


def aborted(endpoints: Endpoints, request: Request, answers: Sequence[Answer]) -> Answer:
    """If no process has what is to be aborted, workers may: they are told once, by this one."""
    found = sum(msgspec.json.decode(answer.body)["aborted"] for answer in answers if answer.status == 200)
    rid, everything = abort_of(request)
    if everything or (rid and not found):
        endpoints.relay.tell_workers(rid, everything=everything)
    return Answer(200, b"")


def counted(endpoints: Endpoints, request: Request, answers: Sequence[Answer]) -> Answer:
    """One page of metrics."""
    if endpoints.pages is None:
        return answers[0]
    pages = [answer for answer in answers if answer.status == 200]
    living = {(get(answer.headers, PROCESS_HEADER) or b"").decode(): answer.body for answer in pages}
    return Answer(200, endpoints.pages.total(living), CONTENT_TYPE.encode())


def _added(lists: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    workers: dict[str, dict[str, Any]] = {}
    roles: dict[str, list[str | None]] = {}
    for found in lists:
        for worker in found:
            roles.setdefault(worker["url"], []).append(_role(worker))
            known = workers.setdefault(worker["url"], worker)
            if known is not worker:
                known.update({key: known[key] + worker[key] for key in SUMMED})
    for url, worker in workers.items():
        lacking = [None] * (len(lists) - len(roles[url]))
        worker["disputed"] = len({*roles[url], *lacking}) > 1
    return list(workers.values())


def _role(worker: dict[str, Any]) -> str | None:
    """What it is for, or will be for; None if it is to leave for good."""
    stays = worker["state"] != State.DRAINING
    role: str | None = worker["worker_type"] if stays else worker["joins_as"]
    return role
