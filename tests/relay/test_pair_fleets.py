"""Fleets of pairs: roles, who is misplaced, drains."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio

from dyn_relay.app import App, Misplaced
from dyn_relay.config import Config
from dyn_relay.control.siblings import Siblings
from dyn_testkit import faults
from dyn_testkit.background import background
from dyn_testkit.client import Response
from dyn_testkit.faults import KILL_WORKER, FaultPlan, at_token
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import Relay, Rows, open_relay, until
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import Pairs, pairs

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
SLOW = WorkerOptions(tick=0.5)
AGGREGATED = b"x-dyn-relay-aggregated"


async def listed(w: Pairs) -> dict[str, dict[str, Any]]:
    found = (await w.ask(None, "/workers", method="GET")).json()["workers"]
    return {row["url"]: row for row in found}


# -- roles ---------------------------------------------------------------------------------------------------------


async def test_workers_say_what_they_are_for(autojump_clock):
    async with pairs(prefill=[None], decode=[None]) as w:
        rows = await listed(w)
        assert [(row["worker_type"], row["misplaced"], row["is_healthy"]) for row in rows.values()] == [
            ("prefill", False, True),
            ("decode", False, True),
        ]
        assert rows[w.prefills[0].url]["bootstrap_port"] == w.prefills[0].bootstrap_port


@pytest.mark.parametrize(("named", "says"), [("prefill", "decode"), ("decode", "prefill"), ("decode", "regular")])
async def test_a_role_that_the_worker_denies_is_a_start_up_error(autojump_clock, named, says):
    """It names both; one that does not answer yet may still turn out right."""
    network = SimNetwork(1)
    mode: Any = {"regular": "null"}.get(says, says)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [worker] = await fleet(1, options=WorkerOptions(disaggregation=mode))
        settings: dict[str, Any] = {"prefill": ("http://nobody:1",), "decode": ("http://nobody:2",)}
        settings[named] = (worker.url,)
        with pytest.raises(ExceptionGroup) as caught:
            async with open_relay(network, "proxy", 30000, (), pd_disaggregation=True, log_level="error", **settings):
                raise AssertionError
        exc: BaseException = caught.value
        while isinstance(exc, BaseExceptionGroup):
            exc = exc.exceptions[0]
        assert isinstance(exc, Misplaced)
        assert str(exc) == f"{worker.url} was named as {named}, and says that it is {says}"


@BOTH
async def test_one_that_comes_back_as_something_else_is_never_chosen(autojump_clock, stream):
    async with pairs(decode=[None, None], policy="round_robin") as w:
        w.decodes[0].kill()
        await trio.sleep(60)
        await w.decodes[0].restart(WorkerOptions(disaggregation="prefill"))
        await w.ready()
        body = generate(8, stream=stream)
        for _ in range(4):
            assert judged(await w.ask(body), body, ORACLE) == []
        assert w.decodes[0].generates == []
        row = (await listed(w))[w.decodes[0].url]
        assert (row["worker_type"], row["traits"]["role"], row["misplaced"]) == ("decode", "prefill", True)
        assert not row["is_healthy"]


@BOTH
async def test_workers_that_are_added_by_hand(autojump_clock, stream):
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [prefill] = await fleet(1, options=WorkerOptions(disaggregation="prefill", bootstrap_port=7777))
        [decode] = await fleet(1, options=WorkerOptions(disaggregation="decode"))
        async with open_relay(network, "proxy", 30000, (), pd_disaggregation=True, log_level="error") as relay:
            one = {"url": prefill.url, "worker_type": "prefill", "bootstrap_port": 7777}
            assert (await relay.ask(one, "/workers")).status == 202
            assert (await relay.ask({"url": decode.url, "worker_type": "decode"}, "/workers")).status == 202
            await relay.ready()
            body = generate(8, stream=stream)
            assert judged(await relay.ask(body), body, ORACLE) == []
            assert prefill.generates[0].json()["bootstrap_port"] == 7777
            for wrong in ({}, {"worker_type": "regular"}, {"worker_type": "both"}, {"worker_type": 5}):
                response = await relay.ask({"url": "http://new:1", **wrong}, "/workers")
                assert (response.status, "worker_type" in response.json()["message"]) == (400, True), wrong
            other = await relay.ask({"url": prefill.url, "worker_type": "decode"}, "/workers")
            assert other.status == 400
            assert "is for prefill" in other.json()["message"]
            assert (await relay.ask({"url": prefill.url}, "/workers")).status == 202
            assert [worker.role for worker in relay.app.fleet.workers] == ["prefill", "decode"]


async def test_workers_that_older_clients_add(autojump_clock):
    """`/add_worker?url=`: the role and the port may be in the query as well."""
    async with open_relay(SimNetwork(1), "proxy", 30000, (), pd_disaggregation=True, log_level="error") as relay:

        async def add(query: str, body: dict[str, Any] | None = None) -> Response:
            return await relay.ask(body, f"/add_worker?url=http://new:1{query}", method="POST")

        for wrong, word in (
            ("&worker_type=both", "worker_type: must be one of"),
            ("&worker_type=", "worker_type: must be one of"),
            ("&worker_type=prefill&worker_type=decode", "worker_type: 'prefill' and 'decode' are different"),
            ("&worker_type=prefill&bootstrap_port=x", "bootstrap_port: must be a port"),
            ("&worker_type=prefill&bootstrap_port=70000", "bootstrap_port: must be a port"),
            ("", "worker_type: prefill or decode is needed"),
            ("&worker_type=regular", "worker_type: must be prefill or decode here, not regular"),
            ("&priority=1", "priority: nothing of a worker can be set"),
        ):
            response = await add(wrong)
            assert (response.status, word in response.json()["message"]) == (400, True), wrong
        differs = await add("&worker_type=prefill", {"worker_type": "decode"})
        assert differs.status == 400
        response = await add("&worker_type=prefill&bootstrap_port=7777", {"worker_type": "prefill"})
        assert (response.status, response.json()["worker_type"]) == (202, "prefill")
        assert response.json()["bootstrap_port"] == 7777


async def test_a_bootstrap_port_that_was_named(autojump_clock):
    """`--prefill URL PORT`: it counts, and not the one that the worker tells."""
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [prefill] = await fleet(1, options=WorkerOptions(disaggregation="prefill"))
        [decode] = await fleet(1, options=WorkerOptions(disaggregation="decode"))
        settings: dict[str, Any] = {"prefill": (prefill.url, "7777"), "decode": (decode.url,), "log_level": "error"}
        async with open_relay(network, "proxy", 30000, (), pd_disaggregation=True, **settings) as relay:
            await relay.ready()
            with trio.move_on_after(1):
                await relay.ask(generate(4))
            assert decode.generates[0].json()["bootstrap_port"] == 7777


async def test_several_processes(autojump_clock, tmp_path):
    """`--processes 2`: both know the roles, also of a worker that joins at one, and draw no room twice."""
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet, background() as nursery:
        [prefill] = await fleet(1, options=WorkerOptions(disaggregation="prefill"))
        first, second = await fleet(2, options=WorkerOptions(disaggregation="decode"))
        relays = []
        for number in range(2):
            config = Config(
                host=f"proxy{number}",
                processes=2,
                seed=number,
                log_level="error",
                pd_disaggregation=True,
                prefill=(prefill.url,),
                decode=(first.url,),
            )
            siblings = Siblings(network, number, 2, tmp_path, replacement=False)
            app = App(config, network.host(config.host), trio.current_time, siblings)
            await nursery.start(app.serve, await network.listen(config.host, 30000), Rows())
            relays.append(Relay(app, f"http://{config.host}:30000", Rows(), network))
        new = {"url": second.url, "worker_type": "decode"}
        assert (await relays[0].ask(new, "/workers")).status == 202
        for relay in relays:
            await relay.ready()
            assert [str(worker.role) for worker in relay.app.fleet.workers] == ["prefill", "decode", "decode"]
            for _ in range(4):
                body = generate(4)
                assert judged(await relay.ask(body), body, ORACLE) == []
        assert len(set(prefill.rooms)) == len(prefill.rooms) == 8


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_health_wants_both(autojump_clock, side):
    """Half a pair serves nobody."""
    async with pairs(prefill=[None], decode=[None]) as w:
        assert (await w.ask(None, "/health", method="GET")).status == 200
        dies = (w.prefills if side == "prefill" else w.decodes)[0]
        dies.kill()
        await until(lambda: any(worker.state == "dead" for worker in w.app.fleet.workers))
        assert (await w.ask(None, "/health", method="GET")).status == 503
        await dies.restart()
        await w.ready()
        assert (await w.ask(None, "/health", method="GET")).status == 200


# -- drains, pauses, poison ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("moment", [0.1, 0.6, 1.1, 2.6])
async def test_a_drain_moves_requests(autojump_clock, stream, side, moment):
    """K: what still runs at a worker that is leaving goes on at another pair, and is exact; nobody has failed."""
    async with pairs(options=SLOW, policy="round_robin") as w:
        body, answers = generate(8, stream=stream, sampling={"stream_interval": 1}, logprob_start_len=0), []

        async def client() -> None:
            answers.append(await w.ask(body))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: w.prefills[0].live and w.decodes[0].live)
            await trio.sleep(moment)
            leaving = {"prefill": w.prefills[0], "decode": w.decodes[0]}[side]
            name = next(worker.id for worker in w.app.fleet.workers if worker.url == leaving.url)
            await w.ask(None, f"/workers/{name}/drain?after=0", method="POST")
            await trio.sleep(1)
            assert name not in [worker.id for worker in w.app.fleet.workers]
            assert leaving.live == 0
        assert judged(answers[0], body, ORACLE) == []
        await w.quiet()
        assert [worker.failures for worker in w.app.fleet.workers] == [0, 0, 0]
        assert len(w.app.rooms) == 0


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_the_last_of_its_kind_is_not_left(autojump_clock, stream, side):
    """A drain without another worker to go to: the request ends where it is."""
    async with pairs(prefill=[None], decode=[None], options=SLOW) as w:
        body, answers = generate(8, stream=stream, logprob_start_len=0), []

        async def client() -> None:
            answers.append(await w.ask(body))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: w.prefills[0].live and w.decodes[0].live)
            await trio.sleep(0.1)
            name = w.app.fleet.workers[0 if side == "prefill" else 1].id
            await w.ask(None, f"/workers/{name}/drain?after=0", method="POST")
        assert judged(answers[0], body, ORACLE) == []
        assert len(w.decodes[0].generates) == 1


@BOTH
async def test_whoever_is_left_goes_back_to_its_own_part_alone(autojump_clock, stream):
    """A request is taken from a decode worker, then the only prefill worker dies: that decode worker is none."""
    death = FaultPlan.in_order([None, None, None, (faults.AT_HEAD, KILL_WORKER)])
    async with pairs(prefill=[death], decode=[None, None], options=SLOW, policy="round_robin") as w:
        answers: list[Response] = []

        async def client(**more: Any) -> None:
            sampling = {"stream_interval": 1, **more}
            answers.append(await w.ask(generate(20, stream=stream, sampling=sampling)))

        async with trio.open_nursery() as clients:
            for more in ({}, {}, {"frequency_penalty": 0.5, "max_new_tokens": 400}):  # which keeps its worker here
                clients.start_soon(partial(client, **more))
                await trio.sleep(0.2)
            await trio.sleep(3)
            assert [len(worker.generates) for worker in w.decodes] == [2, 1]
            name = next(worker.id for worker in w.app.fleet.workers if worker.url == w.decodes[0].url)
            prefill = next(worker.id for worker in w.app.fleet.workers if worker.role == "prefill")
            await w.ask(None, f"/workers/{name}/drain?after=0", method="POST")
        await w.quiet()
        death.verify()
        assert {one["prefill"] for row in w.rows for one in row["attempts"]} == {prefill}
        assert sum(b"no_survivor" in answer.body for answer in answers) == 1


@BOTH
async def test_a_pause_between_two_pairs(autojump_clock, stream):
    """A pause that the proxy orders: no pair begins, and what was cut goes on afterwards."""
    plan = FaultPlan.in_order([(at_token(3), KILL_WORKER)])
    async with pairs(decode=[plan, None], options=SLOW, policy="round_robin") as w:
        body, answers = generate(8, stream=stream, sampling={"stream_interval": 1}), []

        async def client() -> None:
            answers.append(await w.ask(body))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: w.decodes[0].live)
            w.app.fleet.pause(True)
            await plan.fired()
            await trio.sleep(5)
            assert sum(len(worker.generates) for worker in w.workers) == 2
            w.app.fleet.pause(False)
        assert judged(answers[0], body, ORACLE) == []


@BOTH
@pytest.mark.parametrize("permits", [1, 0])
async def test_many_at_once(autojump_clock, stream, permits):
    """--retry-permits: a death ends twelve at once, and they go on, one after the other or together; no room twice."""
    plan = FaultPlan.of(faults.Fault(at_token(3), KILL_WORKER, faults.nth(11)))
    options = WorkerOptions(tick=0.1)
    async with pairs(decode=[plan, None], options=options, retry_permits=permits, policy="round_robin") as w:
        bodies = [generate(8, stream=stream, sampling={"stream_interval": 1}, logprob_start_len=0) for _ in range(24)]
        for number, body in enumerate(bodies):
            body["input_ids"] = [number, 6, 7]
        found: list[list[str]] = []

        async def client(body: dict[str, Any]) -> None:
            found.append(judged(await w.ask(body), body, ORACLE))

        async with trio.open_nursery() as clients:
            for body in bodies:
                clients.start_soon(client, body)
        assert found == [[]] * 24
        plan.verify()
        await w.quiet()
        for side in (w.prefills, w.decodes):
            rooms = [room for worker in side for room in worker.rooms]
            assert len(set(rooms)) == len(rooms) > 24
        assert len(w.app.rooms) == 0


@BOTH
async def test_the_budget_of_migrations(autojump_clock, stream):
    """--migration-limit counts failures of either leg; then the client is told, with what it has."""
    plans = [FaultPlan.of(faults.Fault(at_token(2), faults.CLOSE)) for _ in range(2)]
    async with pairs(decode=plans, policy="round_robin", migration_limit=2) as w:
        response = await w.ask(generate(20, stream=stream, sampling={"stream_interval": 1}))
        error = response.values()[-1]["error"] if stream else response.json()
        assert (error["reason"], error["delivered"]) == ("migration_limit", 6)
        assert sum(len(worker.generates) for worker in w.decodes) == 3
        await w.quiet()
        assert len(w.app.rooms) == 0


@BOTH
async def test_a_full_prefill_worker(autojump_clock, stream):
    """Its 503 is no failure; another one takes the prompt."""
    async with pairs(policy="round_robin") as w:
        w.prefills[0].scheduler.full = True
        body = generate(8, stream=stream)
        assert judged(await w.ask(body), body, ORACLE) == []
        await w.quiet()
        assert [worker.failures for worker in w.app.fleet.workers] == [0] * 4


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_who_is_busy_says_for_how_long(autojump_clock, stream, side):
    """It is left alone for so long; the client hears it where there is nobody else."""
    plan = FaultPlan.in_order([(faults.AT_HEAD, faults.status(503, "30"))] * 9)
    async with pairs(prefill=[plan if side == "prefill" else None], decode=[plan if side == "decode" else None]) as w:
        [target] = (w.app.fleet.workers[0] if side == "prefill" else w.app.fleet.workers[1]).targets
        response = await w.ask(generate(8, stream=stream))
        assert (response.status, response.header("retry-after")) == (503, "30")
        assert target.full(trio.current_time() + 29)
        assert not target.full(trio.current_time() + 31)


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("code", [400, 413, 422])
async def test_an_engines_refusal_is_its_own(autojump_clock, stream, side, code):
    """4xx of either leg: status and body as they are, the other leg ends, nothing is tried again."""
    plan = FaultPlan.in_order([(faults.AT_HEAD, faults.status(code))])
    async with pairs(**{side: [plan, None]}, policy="round_robin") as w:
        response = await w.ask(generate(stream=stream, logprob_start_len=0))
        assert response.status == code
        assert b"Injected status" in response.body
        await trio.sleep(1)
        assert [worker.live for worker in w.workers] == [0] * 4
        assert sum(len(worker.generates) for worker in w.workers) == 2
        await w.quiet()
        assert len(w.app.rooms) == 0
