"""The table of `docs/limits.md` is what clients get; J3: bodies that are too long to be sent again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from dyn_testkit.client import begin
from dyn_testkit.faults import AT_HEAD, KILL_WORKER, STALL, Fault, FaultPlan, at_token, every, status
from dyn_testkit.relay import until
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"


def rows():
    lines = PAGE.read_text().split("| status |", 1)[1].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {(int(row[0]), row[1].strip("`")): (row[3].replace("`", "").split(), row[4] == "yes") for row in cells}


def stalls():
    return FaultPlan.of(Fault(at_token(0), STALL, every))


async def too_long():
    async with world(max_payload_size=1000) as w:
        return await w.ask(b"x" * 1001)


async def behind_another(**options):
    plan = FaultPlan.of(Fault(at_token(0), STALL, every))
    async with world(plans=[plan], max_concurrent_requests=1, stall_timeout_secs=0, **options) as w:
        w.nursery.start_soon(w.ask, generate(rid="a"))
        await until(lambda: "a" in w.app.live)
        response = await w.ask(generate(rid="b", stream=False))
        plan.release()
        await w.quiet()
        return response


async def no_worker():
    async with world(plans=[]) as w:
        return await w.ask(generate(stream=False))


async def unreachable():
    """C11: nothing has started."""
    async with world(plans=[None]) as w:
        w.workers[0].kill()
        response = await w.ask(generate(stream=False))
        assert response.json()["started"] is False
        return response


async def busy():
    async with world(plans=[FaultPlan.of(Fault(AT_HEAD, status(503), every))]) as w:
        return await w.ask(generate(stream=False))


async def timed_out():
    async with world(plans=[stalls()], request_timeout_secs=5) as w:
        return await w.ask(generate(stream=False))


async def not_continued_in_time():
    """C11: with as many tokens as were delivered."""
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), stalls()]
    async with world(plans=plans, policy="round_robin", migration_timeout_secs=5) as w:
        response = await w.ask(generate(stream=False, sampling={"stream_interval": 1}))
        assert (response.json()["started"], response.json()["delivered"]) == (True, 3)
        return response


async def silent():
    async with world(plans=[stalls()], first_token_timeout_secs=5, suspect_attempts=5) as w:
        return await w.ask(generate(stream=False))


SCENARIOS = {
    (413, ""): too_long,
    (429, "queue_full"): lambda: behind_another(queue_size=0),
    (503, "queue_timeout"): lambda: behind_another(queue_timeout_secs=3),
    (503, "no_worker"): no_worker,
    (503, "no_survivor"): unreachable,
    (503, ""): busy,
    (504, "request_timeout"): timed_out,
    (504, "migration_timeout"): not_continued_in_time,
    (504, "migration_limit"): silent,
}
#: Which nobody is ever sent.
UNSENT = (499, "")


def test_each_row_has_a_scenario():
    assert set(rows()) == {*SCENARIOS, UNSENT}
    assert rows()[UNSENT] == ([], False)


@pytest.mark.parametrize("row", SCENARIOS, ids=str)
async def test_the_body_is_as_the_page_says(autojump_clock, row):
    response = await SCENARIOS[row]()
    keys, after = rows()[row]
    error = response.json()
    assert (response.status, error.get("reason", "")) == row
    assert error["code"] == row[0]
    assert sorted(error) == keys
    assert (response.header("retry-after") is not None) is after


async def test_499_is_in_the_trace_and_in_metrics(autojump_clock):
    plan = stalls()
    async with world(plans=[plan]) as w:
        connection = await w.network.connect("proxy", 30000)
        await begin(connection, "/generate", generate())
        await plan.fired()
        connection.close()
        await w.quiet()
        assert [(row["outcome"], row["status"]) for row in w.rows] == [("client_gone", 499)]
        assert w.metric('dyn_relay_http_requests_total{route="/generate",status_class="4xx"}') == 1


@pytest.mark.parametrize("over", [0, 1], ids=["as long as allowed", "longer"])
@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
async def test_a_body_that_is_too_long_to_be_sent_again(autojump_clock, over, stream):
    """J3: served, migratable=no, and a kill is an error."""
    body = generate(stream=stream)
    limit = len(json.dumps(body)) - over
    plan = FaultPlan.in_order([None, (at_token(3), KILL_WORKER)])
    async with world(plans=[plan, None], policy="round_robin", replay_buffer_max=limit) as w:
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        said = "no; reason=replay_buffer_max" if over else "yes"
        assert response.header("x-dyn-relay-migratable") == said
        await w.ask(body)  # at the other one
        response = await w.ask(body)
        plan.verify()
        if not over:
            assert judged(response, body, ORACLE) == []
            return
        error = response.values()[-1]["error"] if stream else response.json()
        assert (error["code"], error["reason"]) == (502, "replay_buffer_max")
        assert response.complete is not stream
        await w.quiet()
        assert w.metric('dyn_relay_refusals_total{reason="replay_buffer_max"}') == 3


async def test_bodies_that_are_held_are_counted(autojump_clock):
    """J3: the memory law, as a gauge."""
    plan = stalls()
    async with world(plans=[plan], stall_timeout_secs=0) as w:
        bodies = [generate(rid=f"r{number}", extra_key="x" * 1000 * number) for number in range(3)]
        for body in bodies:
            w.nursery.start_soon(w.ask, body)
        await plan.fired(times=3)
        assert w.metric("dyn_relay_replay_buffer_bytes") == sum(len(json.dumps(body)) for body in bodies)
        plan.release()
        await w.quiet()
        await trio.sleep(1)
        assert w.metric("dyn_relay_replay_buffer_bytes") == 0
