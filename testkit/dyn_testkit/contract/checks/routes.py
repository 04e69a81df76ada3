"""Methods and paths."""

from __future__ import annotations

from dyn_testkit.client import Response
from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import check, equal, expect


def _refused(response: Response, status: int, detail: str) -> None:
    equal("status", response.status, status)
    equal("content type", response.header("content-type"), "application/json")
    if response.body:
        equal("body", response.json(), {"detail": detail})


@check("§1.1, http_server.py:928")
async def put_is_post(worker: Subject) -> None:
    """`PUT /generate` is the same as `POST /generate`."""
    posted = await worker.ids(worker.body(4))
    value = await worker.unary(worker.body(4), method="PUT")
    equal("output_ids by PUT", value["output_ids"], posted)


@check("§1.1, recorded")
async def unknown_path(worker: Subject) -> None:
    """A path without a route is 404 `{"detail":"Not Found"}`."""
    response = (await worker.ask("/no/such/path")).response
    _refused(response, 404, "Not Found")
    expect(bool(response.body), "the body is empty")


@check("§1.1, recorded")
async def wrong_method(worker: Subject) -> None:
    """A method that a route does not have is 405 `{"detail":"Method Not Allowed"}`, and `allow` names those it has."""
    for method, path, allowed in (("GET", "/generate", {"PUT", "POST"}), ("DELETE", "/health", {"GET"})):
        response = (await worker.ask(path, method=method)).response
        _refused(response, 405, "Method Not Allowed")
        equal("allow", {name.strip() for name in (response.header("allow") or "").split(",")}, allowed)


@check("§1.1, recorded")
async def head_is_not_get(worker: Subject) -> None:
    """`HEAD /health` is 405 with the length of a body that is not sent."""
    response = (await worker.ask("/health", method="HEAD")).response
    _refused(response, 405, "Method Not Allowed")
    equal("content-length", response.header("content-length"), str(len(b'{"detail":"Method Not Allowed"}')))
    equal("bytes after the head", response.wire.partition(b"\r\n\r\n")[2], b"")


@check("recorded: FastAPI's redirect_slashes")
async def trailing_slash(worker: Subject) -> None:
    """A path with a slash too many is 307 with an empty body, and `location` is the whole URL without the slash."""
    for path, body in (("/generate", worker.body(1)), ("/model_info", None)):
        response = (await worker.ask(path + "/", body)).response
        equal("status", response.status, 307)
        equal("location", response.header("location"), worker.url + path)
        equal("body", response.body, b"")


@check("§1.1, http_server.py:1721")
async def abort_answers_empty(worker: Subject) -> None:
    """`POST /abort_request` is always 200 with an empty body, whatever the rid."""
    for body in ({"rid": worker.rid()}, {"rid": ""}, {}):
        response = (await worker.ask("/abort_request", body)).response
        equal("status", response.status, 200)
        equal("body", response.body, b"")
