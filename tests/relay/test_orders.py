"""What is meant for the whole fleet reaches every worker, and one answer says what came of it."""

from __future__ import annotations

import pytest
import trio

from dyn_relay.control.auth import ADMIN
from dyn_relay.control.everyone import ONE_ENGINES, ORDERS
from dyn_relay.control.routes import ROUTES
from dyn_relay.net import ConnectionBroken
from dyn_testkit.client import fetch
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions, control
from dyn_testkit.worker.wire import Reply, json_reply
from tests.relay.bodies import generate
from tests.relay.crowd import listed, order
from tests.relay.harness import world


def got(worker, path):
    return [recorded for recorded in worker.requests if recorded.path == path]


async def test_every_worker_is_told_in_the_clients_words(autojump_clock):
    """C3: method, query and body as they came, the worker's key instead of the client's."""
    async with world(
        plans=[None] * 3, options=WorkerOptions(api_key="w"), worker_api_key="w", admin_api_key="admin"
    ) as w:
        admin = {"authorization": "Bearer admin"}
        body = b'{"new_version": "9",  "abort_all_requests": false}'
        answer = await w.ask(body, "/update_weight_version?x=1", headers=admin)
        assert answer.status == 200
        told = answer.json()
        assert (told["success"], told["new_version"]) == (True, "9")  # as of a single engine
        assert [(row["worker"], row["url"], row["status"]) for row in told["workers"]] == [
            (f"w{number}", f"http://w{number}:30000", 200) for number in (1, 2, 3)
        ]
        for worker in w.workers:
            [recorded] = got(worker, "/update_weight_version")
            assert (recorded.request.method, recorded.request.body) == ("POST", body)
            assert recorded.request.target == "/update_weight_version?x=1"
            assert recorded.request.header(b"authorization") == b"Bearer w"
        known = (await w.ask(path="/workers", body=None, headers=admin)).json()["workers"]
        assert [worker["weight_version"] for worker in known] == ["9"] * 3  # read anew, at once
        assert (await order(w, "/update_weight_version", {})).status == 401


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_answer_in_words(autojump_clock, method):
    """SGLang answers `/flush_cache` with a text; a busy fleet has not flushed, and says who."""
    async with world(options=WorkerOptions(tick=1.0), policy="round_robin") as w:
        answer = await order(w, "/flush_cache?timeout=5", method=method)
        assert (answer.status, answer.json()["success"]) == (200, True)
        assert answer.json()["message"].startswith("Cache flushed.")
        async with trio.open_nursery() as clients:
            clients.start_soon(w.ask, generate(5))
            await until(lambda: w.workers[0].live)
            answer = await order(w, "/flush_cache", method=method)
        assert (answer.status, answer.json()["success"]) == (502, False)
        assert answer.json()["message"] == "1 of 2 workers: w1: status 400"
        assert [row["status"] for row in answer.json()["workers"]] == [400, 200]


async def test_all_are_told_at_once_and_silence_is_a_failure(autojump_clock, monkeypatch):
    async def never(worker, request):
        if worker.host == "w2":
            await trio.sleep_forever()
        await trio.sleep(50)
        return json_reply({"success": True, "message": "", "new_version": "9"})

    monkeypatch.setitem(control.ROUTES, "/update_weight_version", (("POST",), True, never))
    async with world(plans=[None] * 3) as w:
        w.workers[2].kill()
        begun = trio.current_time()
        answer = await order(w, "/update_weight_version", {"new_version": "9"})
        assert trio.current_time() - begun < 61
        assert answer.status == 502
        rows = answer.json()["workers"]
        assert [row["status"] for row in rows] == [200, None, None]
        assert rows[1]["error"] == "no answer within 60 s"
        assert "refused" in rows[2]["error"]


async def test_engines_that_agree_are_quoted(autojump_clock, monkeypatch):
    """A mistake of the client's has the status that an engine gives it."""

    async def refuse(worker, request):
        return Reply(400, b'{"success":false,"message":"no such adapter"}')

    monkeypatch.setitem(control.ROUTES, "/unload_lora_adapter", (("POST",), True, refuse))
    async with world() as w:
        answer = await order(w, "/unload_lora_adapter", {"lora_name": "x"})
        assert (answer.status, answer.json()["success"]) == (400, False)
        assert [row["answer"]["message"] for row in answer.json()["workers"]] == ["no such adapter"] * 2


async def test_an_empty_fleet_obeys_nothing(autojump_clock):
    async with world(plans=[]) as w:
        for path, method in (("/flush_cache", "POST"), ("/pause_generation", "POST"), ("/v1/loads", "GET")):
            assert (await order(w, path, method=method)).status == 503, path
        assert not w.app.fleet.paused


async def test_an_order_is_given_once(autojump_clock, monkeypatch):
    """A connection that breaks under it is no reason to say it again: the worker may have heard it."""
    heard = []

    async def hang_up(worker, request):
        heard.append(worker.host)
        raise ConnectionBroken

    monkeypatch.setitem(control.ROUTES, "/load_lora_adapter", (("POST",), True, hang_up))
    async with world(plans=[None]) as w:
        await w.ask(generate(2))  # leaves an idle connection
        answer = await order(w, "/load_lora_adapter", {})
        assert answer.status == 502
        assert heard == ["w1"]


@pytest.mark.parametrize("path", sorted(ONE_ENGINES))
async def test_what_is_made_for_one_engine_is_refused(autojump_clock, path):
    """Tensors, handles and ranks in a group are one engine's: to send them to any, or to all, would be a mistake."""
    async with world() as w:
        answer = await order(w, path, {})
        assert answer.status == 400
        assert path in answer.json()["message"]
        assert not any(got(worker, path) for worker in w.workers)


def test_every_admin_path_of_stocks_is_either_told_to_all_or_refused_or_only_read():
    assert ADMIN - ORDERS.keys() - ONE_ENGINES == {"/get_weights_by_name"}
    assert ORDERS.keys() | ONE_ENGINES <= ADMIN
    assert ORDERS.keys() | ONE_ENGINES <= ROUTES.keys()


@pytest.mark.parametrize("path", ["/v1/loads?include=core", "/get_loads"])
async def test_loads_of_all_workers(autojump_clock, path):
    """H5: what miles and slime poll until it is 0: one list, which says whose each load is."""
    options = [WorkerOptions(tick=1.0, dp_size=2), WorkerOptions(tick=1.0)]
    async with world(options=options, policy="round_robin", split_batches=False) as w:
        async with trio.open_nursery() as clients:
            clients.start_soon(w.ask, generate(5))
            clients.start_soon(w.ask, generate(5))
            await until(lambda: all(worker.live for worker in w.workers))
            answer = await order(w, path, method="GET")
        whole = answer.json()
        assert answer.status == 200
        assert whole.keys() == {"timestamp", "version", "accelerator", "num_accelerators", "loads"}
        assert (whole["version"], whole["num_accelerators"]) == ("0.5.23", 2)
        assert [(load["worker"], load["dp_rank"]) for load in whole["loads"]] == [("w1", 0), ("w1", 1), ("w2", 0)]
        assert whole["loads"][2]["url"] == "http://w2:30000"
        assert whole["loads"][2]["num_running_reqs"] == 1
        answer = await order(w, path, method="GET")
        assert sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in answer.json()["loads"]) == 0
        queries = {recorded.request.target.partition("?")[2] for recorded in got(w.workers[0], "/v1/loads")}
        assert queries == {path.partition("?")[2]}


async def test_a_load_that_cannot_be_read_does_not_pass_for_none(autojump_clock, monkeypatch):
    """A dead worker has none; one that does not answer, or not that, may have many."""
    async with world() as w:
        w.workers[1].kill()
        assert (await order(w, "/v1/loads", method="GET")).status == 502
        await until(lambda: w.app.fleet.workers[1].state == "dead")
        answer = await order(w, "/v1/loads", method="GET")
        assert (answer.status, [load["worker"] for load in answer.json()["loads"]]) == (200, ["w1"])

        async def odd(worker, request):
            return json_reply({"loads": 0})

        monkeypatch.setitem(control.ROUTES, "/v1/loads", (("GET",), False, odd))
        assert (await order(w, "/v1/loads", method="GET")).status == 502
        assert (await order(w, "/v1/loads?format=prometheus", method="GET")).status == 400


async def test_a_worker_is_put(autojump_clock):
    """SMG's PUT replaces a worker by one of the same URL; nothing else of it can be set, and that is said by name."""
    async with world() as w:
        url = w.workers[0].url
        assert (await order(w, "/workers/w1", {"url": url}, "PUT")).status == 202
        answer = await order(w, "/workers/w1", {"url": url, "priority": 3, "labels": {}}, "PUT")
        assert (answer.status, answer.json()["message"].split(":")[0]) == (400, "priority")
        assert (await order(w, "/workers/w1", {"url": w.workers[1].url}, "PUT")).status == 400
        assert (await order(w, "/workers/w1", {}, "PUT")).status == 400
        assert (await order(w, "/workers/w7", {"url": url}, "PUT")).status == 404
        assert [worker["state"] for worker in (await listed(w)).values()] == ["ready", "ready"]


async def test_the_new_endpoints_want_the_admins_key(autojump_clock):
    async with world(api_key="user", admin_api_key="admin") as w:
        user = {"authorization": "Bearer user"}
        for method, path in (("POST", "/workers/w1/drain"), ("PUT", "/workers/w1"), *(("POST", one) for one in ORDERS)):
            answer = await fetch(w.network, w.url, path, {}, method=method, headers=user)
            assert answer.status == 401, path
        assert (await fetch(w.network, w.url, "/v1/loads", None, method="GET", headers=user)).status == 200
