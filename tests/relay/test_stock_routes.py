"""Every route of stock SGLang has its methods and its key here, and nothing that its admin may do is left to chance."""

from __future__ import annotations

from pathlib import Path

import pytest

from dyn_relay.control.admin import ADMIN, ONE_ENGINES, ORDERS, READS
from dyn_relay.control.routes import ROUTES
from dyn_relay.http11.headers import get
from dyn_testkit.client import fetch
from tests.relay.harness import world
from tests.relay.stock_routes import ADMIN_OPTIONAL, NORMAL

#: Not of 0.5.23, but of older releases.
OLDER = {"/clear_hicache_storage_backend": "GET POST"}
KEYS = {"api_key": "user", "admin_api_key": "admin"}
USER, THE_ADMIN = {"authorization": "Bearer user"}, {"authorization": "Bearer admin"}


def spelled(path):
    """As the proxy writes it."""
    return path.replace("{method}", "*")


def spelled_out(path):
    """As SGLang and the docs write it."""
    return path.replace("*", "{method}")


def a(path):
    """One of those that a route with a part to fill in has."""
    return path.replace("{method}", "get_state").replace("{model:path}", "m").replace("{response_id}", "r")


def rows(table):
    return [(path, method) for path, methods in table.items() for method in methods.split()]


def heard(w, path):
    """Which workers were asked, how."""
    return [(worker.host, one.request.method) for worker in w.workers for one in worker.requests if one.path == path]


def test_all_that_stock_keeps_for_its_admin_is_decided():
    assert {spelled(path) for path in ADMIN_OPTIONAL} | OLDER.keys() == ADMIN
    assert len(ADMIN) == 1 + len(ORDERS) + len(ONE_ENGINES) + len(READS)  # each in one table
    assert all(row.why for row in [*ORDERS.values(), *ONE_ENGINES.values()])
    assert ORDERS.keys() | ONE_ENGINES.keys() <= ROUTES.keys()
    assert not READS.keys() & ROUTES.keys()


def test_the_docs_name_them_all():
    page = (Path(__file__).parents[2] / "docs" / "control.md").read_text()
    assert [path for path in ADMIN if f"`{spelled_out(path)}`" not in page] == []


def test_methods_are_stocks():
    stock = {spelled(path): set(methods.split()) for path, methods in (ADMIN_OPTIONAL | OLDER).items()}
    for path, row in [*ORDERS.items(), *ONE_ENGINES.items()]:
        assert set(row.methods) == stock[path], path
        assert ROUTES[path].handlers.keys() == stock[path], path


async def test_the_admins_key_opens_what_it_opens_at_stock(autojump_clock):
    """A client's key opens all but these; and what it does not open reaches nobody."""
    async with world(**KEYS) as w:
        asked = [w.network, w.url]
        for path, method in rows(ADMIN_OPTIONAL | OLDER):
            assert (await fetch(*asked, a(path), None, method=method, headers=USER)).status == 401, path
            assert not heard(w, a(path))
        for path, method in rows(NORMAL):
            assert (await fetch(*asked, a(path), None, method=method, headers=USER)).status != 401, path


@pytest.mark.parametrize(("path", "method"), rows(ADMIN_OPTIONAL | OLDER))
async def test_who_is_told(autojump_clock, path, method):
    """All; or none, with a reason; or one, if it only reads."""
    async with world(plans=[None] * 3, **KEYS) as w:
        answer = await fetch(w.network, w.url, a(path) + "?x=1", None, method=method, headers=THE_ADMIN)
        if path in ORDERS:
            assert heard(w, path) == [(f"w{number}", method) for number in (1, 2, 3)]
        elif spelled(path) in ONE_ENGINES:
            assert answer.status == 400
            assert ONE_ENGINES[spelled(path)].why in answer.json()["message"]
            assert not heard(w, a(path))
        elif path in READS:
            assert len(heard(w, path)) == 1
        else:
            assert path == "/abort_request"


@pytest.mark.parametrize("path", sorted({*ORDERS, *ONE_ENGINES}))
async def test_other_methods_are_refused_head_above_all(autojump_clock, path):
    """A HEAD changes nothing; a GET here may."""
    async with world() as w:
        methods = set((ADMIN_OPTIONAL | OLDER)[spelled_out(path)].split())
        for method in sorted({"HEAD", "GET", "POST", "PUT", "DELETE", "PATCH"} - methods):
            answer = await fetch(w.network, w.url, path.replace("*", "x"), None, method=method)
            assert answer.status == 405, method
            assert get(answer.headers, b"allow") == ", ".join(sorted({*methods, "OPTIONS"})).encode()
        assert not heard(w, path.replace("*", "x"))
        assert not w.app.fleet.paused


@pytest.mark.parametrize(
    "path",
    ["/dumper%2Fget_state", "//dumper/x", "/x/../dumper/x", "/hicache%2Fstorage-backend", "/hicache//storage-backend"],
)
async def test_no_disguise_leads_past_the_table(autojump_clock, path):
    async with world(**KEYS) as w:
        for headers in (USER, THE_ADMIN):
            assert (await fetch(w.network, w.url, path, {}, headers=headers)).status in (400, 401)
        assert not any(one.request.method == "POST" for worker in w.workers for one in worker.requests)


async def test_a_worker_may_be_named_by_its_url(autojump_clock):
    """That is no disguise."""
    async with world() as w:
        for name in ("http%3A%2F%2Fw1%3A30000", "w1"):
            answer = await fetch(w.network, w.url, f"/workers/{name}", None, method="GET")
            assert (answer.status, answer.json()["id"]) == (200, "w1")
