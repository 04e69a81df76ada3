"""What is meant for the whole fleet reaches every worker, and one answer says what came of it."""

from __future__ import annotations

from urllib.parse import quote

import pytest
import trio

from dyn_relay.control.admin import ORDERS
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


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("named", ["w2", quote("http://w2:30000", safe="")])
@pytest.mark.parametrize(("path", "says"), [("/start_profile", b"Start"), ("/stop_profile", b"Stop")])
async def test_one_worker_is_told_by_its_name(autojump_clock, method, named, path, says):
    """Nobody else is; the answer is that worker's own, a text."""
    async with world(options=WorkerOptions(api_key="w"), worker_api_key="w", admin_api_key="admin") as w:
        body = {"num_steps": "3"} if method == "POST" else None
        at, admin = f"/workers/{named}{path}", {"authorization": "Bearer admin"}
        answer = await fetch(w.network, w.url, f"{at}?x=1", body, method=method, headers=admin)
        assert (answer.status, answer.header("content-type")) == (200, "text/plain; charset=utf-8")
        assert answer.body.startswith(says)
        [recorded] = got(w.workers[1], path)
        assert (recorded.request.method, recorded.request.target) == (method, f"{path}?x=1")
        assert recorded.request.header(b"authorization") == b"Bearer w"
        assert got(w.workers[0], path) == []
        assert (await order(w, at, {})).status == 401


async def test_one_worker_that_cannot_be_told(autojump_clock, monkeypatch):
    async def refuse(worker, request):
        return Reply(500, b"Internal Server Error", b"text/plain")

    monkeypatch.setitem(control.ROUTES, "/stop_profile", (("POST",), True, refuse))
    async with world() as w:
        answer = await order(w, "/workers/w1/stop_profile")
        assert (answer.status, answer.body) == (500, b"Internal Server Error"), "as it is said there"
        w.workers[0].kill()
        answer = await order(w, "/workers/w1/start_profile")
        assert answer.status == 502
        assert "w1" in answer.json()["message"]
        assert (await order(w, "/workers/w9/start_profile")).status == 404
        assert (await order(w, "/workers/w2/start_profile", method="PUT")).status == 405
        for path in ("flush_cache", "pause_generation", "update_weights_from_disk"):
            assert (await order(w, f"/workers/w2/{path}")).status >= 400, "what all must do is not for one"
            assert got(w.workers[1], f"/{path}") == []


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_order_is_given_once(autojump_clock, monkeypatch, method):
    """A connection that breaks under it is no reason to say it again: the worker may have heard it."""
    heard = []

    async def hang_up(worker, request):
        heard.append(worker.host)
        raise ConnectionBroken

    monkeypatch.setitem(control.ROUTES, "/start_profile", ((method,), True, hang_up))
    async with world(plans=[None]) as w:
        await w.ask(generate(2))  # leaves an idle connection
        answer = await order(w, "/start_profile", method=method)
        assert answer.status == 502
        assert heard == ["w1"]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("path", "no"),
    [
        ("/set_internal_state", [False]),
        ("/set_internal_state", [True, False]),
        ("/pause_generation", {"success": False, "message": "no"}),
        ("/flush_cache", {"success": None}),
        ("/weights_checker", False),
        ("/start_profile", [{"success": False}]),
    ],
)
async def test_a_200_that_says_no_is_a_no(autojump_clock, monkeypatch, path, no, turned):
    """Whoever comes first in the list; an engine's scheduler can refuse what its HTTP process takes."""

    async def answer(worker, request):
        return json_reply(no if (worker.host == "w1") is not turned else [True])

    monkeypatch.setitem(control.ROUTES, path, (("POST",), True, answer))
    async with world() as w:
        answer = await order(w, path, {"server_args": {"x": 1}})
        assert (answer.status, answer.json()["success"]) == (502, False)
        name = "w2" if turned else "w1"
        assert (
            answer.json()["message"] == f"1 of 2 workers: {name}: status 200, but its answer says that it was not done"
        )
        assert no in [row["answer"] for row in answer.json()["workers"]]


async def test_a_pause_that_nobody_obeys_is_none(autojump_clock, monkeypatch):
    async def refuse(worker, request):
        return json_reply({"success": False})

    monkeypatch.setitem(control.ROUTES, "/pause_generation", (("POST",), True, refuse))
    async with world() as w:
        assert (await order(w, "/pause_generation", {})).status == 502
        assert not w.app.fleet.paused


@pytest.mark.parametrize("turned", [False, True])
async def test_the_top_does_not_depend_on_who_came_first(autojump_clock, monkeypatch, turned):
    """What all say stands there; where they differ, null does."""

    async def answer(worker, request):
        if (worker.host == "w1") is turned:
            return Reply(200, b"Loaded.\n", content_type=None)
        return json_reply({"message": "Loaded.", "corpus_id": worker.host})

    monkeypatch.setitem(control.ROUTES, "/add_external_corpus", (("POST",), True, answer))
    async with world() as w:
        answer = await order(w, "/add_external_corpus", {})
        top = {name: value for name, value in answer.json().items() if name != "workers"}
        assert (answer.status, top) == (200, {"message": "Loaded.", "corpus_id": None, "success": True})


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
        assert (await order(w, "/v1/loads?format=prometheus", method="GET")).status == 400


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"loads": None}, "its loads are no list"),
        ({"loads": 0}, "its loads are no list"),
        ({"loads": [1]}, "one of its loads is no object"),
        ({"load": []}, "no loads in its answer"),
        ([], "no loads in its answer"),
    ],
)
async def test_an_unreadable_load_is_named(autojump_clock, monkeypatch, odd, what):
    """Whose, and what is wrong with it; a dead worker is not to blame."""
    loads = control.ROUTES["/v1/loads"][2]

    async def answer(worker, request):
        return json_reply(odd) if worker.host == "w2" else await loads(worker, request)

    monkeypatch.setitem(control.ROUTES, "/v1/loads", (("GET",), False, answer))
    async with world(plans=[None] * 3) as w:
        w.workers[0].kill()
        await until(lambda: w.app.fleet.workers[0].state == "dead")
        answer = await order(w, "/v1/loads", method="GET")
        assert (answer.status, answer.json()["message"]) == (502, f"1 of 2 workers: w2: {what}")
        assert [row["worker"] for row in answer.json()["workers"]] == ["w1", "w2", "w3"]


async def test_a_mistake_in_a_question_for_loads_has_the_engines_status(autojump_clock, monkeypatch):
    async def refuse(worker, request):
        return Reply(400, b'{"detail":"no such rank"}')

    monkeypatch.setitem(control.ROUTES, "/v1/loads", (("GET",), False, refuse))
    async with world() as w:
        w.workers[0].kill()
        await until(lambda: w.app.fleet.workers[0].state == "dead")
        assert (await order(w, "/v1/loads?dp_rank=9", method="GET")).status == 400


async def test_loads_are_not_waited_for_long(autojump_clock, monkeypatch):
    async def never(worker, request):
        await trio.sleep_forever()

    monkeypatch.setitem(control.ROUTES, "/v1/loads", (("GET",), False, never))
    async with world(plans=[None]) as w:
        answer = await order(w, "/v1/loads", method="GET")
        assert (answer.status, answer.json()["message"]) == (502, "1 of 1 workers: w1: no answer within 10 s")


@pytest.mark.parametrize("path", ["/v1/loads?include=core", "/get_loads"])
async def test_a_head_of_loads_is_a_get_without_a_body(autojump_clock, path):
    async with world() as w:
        answer = await order(w, path, method="HEAD")
        assert (answer.status, answer.body) == (200, b"")
        assert [recorded.request.method for recorded in got(w.workers[0], "/v1/loads")] == ["GET"]


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


@pytest.mark.parametrize(("method", "path"), [("POST", "/workers"), ("PUT", "/workers/w1"), ("POST", "/add_worker")])
async def test_what_cannot_be_set_of_a_worker_is_named(autojump_clock, method, path):
    """SMG's clients send keys, priorities, labels: dropped in silence, they would be taken for set."""
    async with world() as w:
        url = w.workers[0].url
        for field, value in {
            "api_key": "k",
            "priority": 3,
            "labels": {},
            "model_id": "m",
            "worker_type": "prefill",
        }.items():
            answer = await order(w, path, {"url": url, field: value}, method)
            assert (answer.status, answer.json()["message"].split(":")[0]) == (400, field)
        answer = await order(w, f"{path}?url={url}&api_key=k", method=method)
        assert (answer.status, answer.json()["message"].split(":")[0]) == (400, "api_key")
        assert (await order(w, path, {"url": url, "worker_type": "regular"}, method)).status == 202
        assert list(await listed(w)) == ["w1", "w2"]


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/workers/w1"), ("POST", "/remove_worker")])
async def test_what_a_removal_does_not_heed_is_named(autojump_clock, method, path):
    """A time is a drain's: taken for one, it would leave the worker's requests where they are."""
    async with world() as w:
        query = f"?url={w.workers[0].url}&after=0"
        answer = await order(w, path + query, method=method)
        assert (answer.status, answer.json()["message"].split(":")[0]) == (400, "after")
        answer = await order(w, path, {"url": w.workers[0].url, "drain": True}, method)
        assert (answer.status, answer.json()["message"].split(":")[0]) == (400, "drain")
        assert list(await listed(w)) == ["w1", "w2"]


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("?url=http://a:1", {"url": "http://b:1"}),
        ("?url=http://a:1", {"worker_url": "http://b:1"}),
        ("?url=http://a:1&url=http://b:1", {}),
        ("", {"url": "http://a:1", "worker_url": "http://b:1"}),
    ],
)
async def test_two_urls_are_no_worker(autojump_clock, query, body):
    async with world() as w:
        answer = await order(w, f"/workers{query}", body)
        assert (answer.status, answer.json()["message"]) == (
            400,
            "url: 'http://a:1' and 'http://b:1' are different workers",
        )
        assert list(await listed(w)) == ["w1", "w2"]
        assert (await order(w, "/workers?url=http://a:1", {"url": "http://a:1"})).status == 202


@pytest.mark.parametrize(
    ("query", "body"), [("?after=0&force=1", {}), ("?timeout=3", {}), ("", {"after": 3}), ("", [])]
)
async def test_a_drain_that_says_more_is_refused(autojump_clock, query, body):
    """Whoever says `timeout=3` does not mean to wait for ever."""
    async with world() as w:
        answer = await order(w, f"/workers/w1/drain{query}", body)
        name = "body" if body == [] else next(iter(body), query[1:].split("&")[-1].split("=")[0])
        assert (answer.status, answer.json()["message"].split(":")[0]) == (400, name)
        assert [worker["state"] for worker in (await listed(w)).values()] == ["ready", "ready"]


async def test_the_new_endpoints_want_the_admins_key(autojump_clock):
    async with world(api_key="user", admin_api_key="admin") as w:
        user = {"authorization": "Bearer user"}
        for method, path in (
            ("POST", "/workers/w1/drain"),
            ("PUT", "/workers/w1"),
            *((order.methods[0], one) for one, order in ORDERS.items()),
        ):
            answer = await fetch(w.network, w.url, path, {}, method=method, headers=user)
            assert answer.status == 401, path
        assert (await fetch(w.network, w.url, "/v1/loads", None, method="GET", headers=user)).status == 200
