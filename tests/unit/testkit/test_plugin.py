"""The pytest plugin: what its fixtures do, and what it says to those who make the usual mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dyn_testkit.fixtures  # noqa: F401 - once for all: pytester forgets what the tests it runs have imported

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[3] / "docs" / "testkit.md"

PRELUDE = """
import pytest
import trio
from dyn_testkit import faults
from dyn_testkit.client import fetch
from dyn_testkit.faults import CLOSE, STALL, Fault, FaultPlan, at_token, nth
from dyn_testkit.worker import WorkerOptions

BODY = {"input_ids": [1, 2, 3], "rid": "mine", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
STREAM = {**BODY, "stream": True}
CUT = FaultPlan.of(Fault(at_token(3), CLOSE, nth(0)))
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a test file; what pytest said."""
    monkeypatch.delenv("DYN_SEED", raising=False)
    pytester.makeini("[pytest]\ntrio_mode = true\nfilterwarnings = error\naddopts = -p no:hypothesispytest")

    def run(code, *args, failed=0, passed=0, errors=0):
        pytester.makepyfile(PRELUDE + code)
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *args)
        result.assert_outcomes(passed=passed, failed=failed, errors=errors)
        return result.stdout.str()

    return run


def test_loading_it_imports_nothing_heavy():
    code = (
        "import sys, dyn_testkit.plugin as p; "
        "heavy = {'trio', 'h11', 'hypothesis', 'msgspec', 'structlog', 'dyn_relay'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_of_the_page(pytester):
    [example] = re.findall(r"^```python\n(import pytest\n.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    pytester.makepyfile(example)
    pytester.makeini("[pytest]\nfilterwarnings = error")
    pytester.runpytest_inprocess().assert_outcomes(passed=example.count("async def test_"))


def test_on_real_sockets(run):
    run(
        """
async def test_worker(mock_worker):
    mock_worker.faults.add(Fault(at_token(2), CLOSE))
    assert mock_worker.host == "127.0.0.1"
    assert (await mock_worker.ask(STREAM)).broken == "eof"

@pytest.mark.dyn_worker(dialect="mixed")
async def test_options(mock_worker):
    assert mock_worker.options.dialect == "mixed"

async def test_relay(fleet, relay):
    first, second = await fleet(2, faults=[CUT, None])
    await relay.ready()
    answer = await relay.ask(STREAM)
    assert len(answer.values()[-1]["output_ids"]) == 8
    assert len(second.generates) == 1
    await relay.quiet()
    [row] = relay.rows
    assert [attempt["url"] for attempt in row["attempts"]] == [first.url, second.url]
    assert not any(relay.gauges.values())
    assert relay.metric('dyn_relay_migrations_total{reason="cut"}') == 1
""",
        passed=3,
    )


def test_in_memory(run):
    run(
        """
@pytest.mark.dyn_relay(stall_timeout_secs=0)
async def test_hours(sim, fleet, relay, autojump_clock):
    slow = WorkerOptions(tick=3600.0)
    [worker] = await fleet(options=slow)
    await relay.ready()
    sim.partition("relay", "w1")
    with trio.move_on_after(60) as scope:
        await relay.ask(STREAM)
    assert scope.cancelled_caught
    sim.heal("relay", "w1")
    assert (await relay.ask({**STREAM, "rid": "other"})).complete
    assert trio.current_time() > 7 * 3600

@pytest.mark.dyn_relay(migration_limit=0, seed=3)
class TestMarked:
    @pytest.mark.dyn_relay(migration_max_seq_len=5)
    async def test_options(self, sim, relay, mock_worker, autojump_clock):
        config = relay.app.config
        assert (config.migration_limit, config.migration_max_seq_len, config.seed) == (0, 5, 3)
        await relay.ready()
        assert (await relay.ask(BODY)).header("x-dyn-relay-migratable") == "no; reason=migration_limit"
""",
        passed=2,
    )


def test_one_seed_one_run(run):
    """Whatever order tasks run in, and whatever links draw, comes from the seed."""
    code = """
from dyn_testkit.simnet import Link

@pytest.mark.parametrize("_", range(2))
async def test_times(sim, fleet, relay, autojump_clock, _):
    sim.link("relay", "w1", Link(latency=0.1, jitter=0.5))
    await fleet()
    await relay.ready()
    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(relay.ask, {**BODY, "rid": f"rid {number}"})
    print("\\nat", trio.current_time(), [row["rid"] for row in relay.rows])
"""
    code = code.replace('    sim.link("relay"', '    sim.host("w1")\n    sim.link("relay"')
    said = [re.findall("^at .*$", run(code, "-s", "--dyn-seed", seed, passed=2), re.MULTILINE) for seed in "1231"]
    assert all(len(lines) == 2 and lines[0] == lines[1] for lines in said)
    assert said[0] == said[3]
    assert len({lines[0] for lines in said}) == 3


def test_a_failure_tells_how_to_run_it_again(run, monkeypatch):
    code = """
import os
async def test_fails(sim, dyn_seed, autojump_clock):
    assert dyn_seed == 0, os.environ["DYN_SEED"]

def test_of_something_else():
    assert False
"""
    output = run(code, "--dyn-seed", "17", failed=2)
    assert "AssertionError: 17" in output
    assert output.count("seed=17 commit=unknown\npytest --dyn-seed 17 ") == 1
    assert "::test_fails'" in output
    assert "DYN_SEED" not in os.environ
    monkeypatch.setenv("DYN_SEED", "18")
    assert "pytest --dyn-seed 18" in run(code, failed=2)


def test_a_seed_is_a_number(pytester, monkeypatch):
    monkeypatch.setenv("DYN_SEED", "seven")
    result = pytester.runpytest_inprocess()
    assert "DYN_SEED: 'seven' is not a whole number" in result.stderr.str()


def test_in_a_plain_function(run):
    output = run("def test_it(fleet): pass", errors=1)
    assert "test_it: the fixture `fleet` runs beside the test: make it `async def test_it`" in output
    assert "open_fleet" in output


def test_a_mistake_is_its_own_tests_alone(run):
    """pytest would keep a fixture that has stopped on its way, and every later test that takes it would break."""
    code = "def test_mistake(mock_worker): pass\nasync def test_right(mock_worker): await mock_worker.ask(BODY)\n"
    output = run(code, errors=1, passed=1)
    assert "make it `async def test_mistake`" in output


MARKS = {
    'dyn_worker(dialekt="mixed")': "the mark `dyn_worker` has no option 'dialekt'; is it 'dialect'?",
    'dyn_relay(polcy="x")': "the mark `dyn_relay` has no option 'polcy'; is it 'policy'?",
    "dyn_relay(port=1)": "the mark `dyn_relay` has no option 'port'",
    'dyn_relay("round_robin")': "the mark `dyn_relay` takes its options by name, not 'round_robin'",
}


@pytest.mark.parametrize(("mark", "words"), MARKS.items(), ids=MARKS)
def test_a_mark_that_says_nothing(run, mark, words):
    assert words in run(f"@pytest.mark.{mark}\nasync def test_it(mock_worker, relay): pass", errors=1)


def test_a_mark_of_a_fixture_that_is_not_taken(run):
    output = run('@pytest.mark.dyn_worker(dialect="mixed")\nasync def test_it(fleet): await fleet()', errors=1)
    assert "test_it: the mark `dyn_worker` is for the fixture `mock_worker`, which the test does not take" in output


def test_without_trio_mode(pytester):
    pytester.makepyfile("async def test_it(mock_worker): pass")
    output = pytester.runpytest_inprocess().stdout.str()
    assert "needs a test that trio runs: mark it with `@pytest.mark.trio`, or set `trio_mode = true`" in output


def test_without_pytest_trio(pytester):
    pytester.makepyfile("async def test_it(mock_worker): pass")
    output = pytester.runpytest_inprocess("-p", "no:trio").stdout.str()
    assert "needs pytest-trio: `pip install pytest-trio`" in output


def test_somebody_elses_fixture_of_the_same_name(run):
    run(
        """
@pytest.fixture
def fleet():
    return 3

def test_it(fleet):
    assert fleet == 3
""",
        passed=1,
    )


MISTAKES = {
    "a request before the proxy is ready": (
        """
async def test_it(fleet, relay):
    await fleet()
    await relay.ask(BODY)
""",
        r"`await relay.ready\(\)` before the first request, .*http://127.0.0.1:\d+ is starting",
    ),
    "a worker that came later": (
        """
async def test_it(fleet, relay):
    await fleet()
    await relay.ready()
    await fleet()
    await relay.ask(BODY)
""",
        r"after each `fleet\(...\)`: http://127.0.0.1:\d+ is ready, http://127.0.0.1:\d+ is starting",
    ),
    "no worker": (
        "async def test_it(relay): await relay.ask(BODY)",
        r"the proxy has no worker: `await fleet\(2\)` first",
    ),
    "asking a dead worker": (
        """
async def test_it(mock_worker):
    mock_worker.kill()
    await mock_worker.ask(BODY)
""",
        r"WorkerIsDead: the worker 127.0.0.1:\d+ is dead \(deaths so far: 1\); `await worker.restart\(\)` brings it",
    ),
    "killing twice": (
        """
async def test_it(mock_worker):
    mock_worker.kill()
    mock_worker.kill()
""",
        r"WorkerIsDead: the worker 127.0.0.1:\d+ is dead \(deaths so far: 1\)",
    ),
    "faults that never happen": (
        """
async def test_it(fleet):
    one, two = await fleet(2, faults=[CUT, FaultPlan.of(Fault(at_token(99), STALL), Fault(at_token(1), CLOSE, nth(3)))])
    assert not (await one.ask(STREAM)).complete
    assert (await two.ask(STREAM)).complete
""",
        r"127.0.0.1:\d+: stall@token:99:0 never happened \(1 requests came\)\n"
        r".*127.0.0.1:\d+: close@token:1:0 never happened \(1 requests came\)\n",
    ),
    "a fault that is no plan": (
        "async def test_it(fleet): await fleet(faults=[Fault(at_token(3), CLOSE)])",
        r"TypeError: faults: a FaultPlan or None for each worker, not Fault\(.*see FaultPlan.of",
    ),
    "one plan for all workers": (
        "async def test_it(fleet): await fleet(2, faults=CUT)",
        r"TypeError: faults: a list with a FaultPlan or None for each worker, not one FaultPlan",
    ),
    "a fault that is none": (
        "async def test_it(mock_worker): mock_worker.faults.add((at_token(3), CLOSE))",
        r"TypeError: a Fault is wanted, not \(.*: Fault\(where, what\)",
    ),
    "a dialect that nobody speaks": (
        """
@pytest.mark.dyn_worker(dialect="mixd")
async def test_it(mock_worker): pass
""",
        r"ValueError: dialect: must be one of cumulative, incremental, mixed, not 'mixd'",
    ),
    "waiting for what cannot come": (
        """
async def test_it(sim, fleet, relay, autojump_clock):
    await fleet(2)
    sim.partition("relay", "w1")
    await relay.ready()
""",
        r"NotInTime: waited in vain for 3600 s: http://w1:30000 is \w+, http://w2:30000 is ready",
    ),
    "plans for other workers": (
        "async def test_it(fleet): await fleet(2, faults=[CUT])",
        r"ValueError: faults: 1 for 2 workers; give one a worker, None for nothing",
    ),
    "a port in use": (
        """
async def test_it(fleet):
    [worker] = await fleet()
    await fleet(port=worker.port)
""",
        r"OSError: \[Errno 98\] no worker can listen on 127.0.0.1:\d+: Address already in use",
    ),
    "a port in use in memory": (
        """
from dyn_testkit.fleet import open_fleet
async def test_it(sim, fleet, relay, autojump_clock):
    await fleet()
    async with open_fleet(sim, "relay", 30000) as other:
        await other()
""",
        r"OSError: \[Errno 98\] no worker can listen on relay:30000: Address already in use",
    ),
    "a proxy's port in use": (
        """
from dyn_testkit.relay import open_relay
async def test_it(dyn_network, mock_worker):
    async with open_relay(dyn_network, port=mock_worker.port): pass
""",
        r"OSError: \[Errno 98\] the proxy cannot listen on 127.0.0.1:\d+: Address already in use",
    ),
    "no virtual time": (
        "async def test_it(sim): pass",
        r"test_it: `sim` needs virtual time, and the clock is the real one.*Add `autojump_clock`",
    ),
    "time that stands still": (
        "async def test_it(sim, mock_clock): pass",
        r"test_it: `sim` needs virtual time, and the clock stands still\. Add `autojump_clock`",
    ),
    "virtual time on real sockets": (
        "async def test_it(mock_worker, autojump_clock): pass",
        r"test_it: real sockets know nothing of a mock clock.*Add `sim`",
    ),
    "an answer that nobody awaits": (
        """
async def test_it(sim, fleet, relay, nursery, autojump_clock):
    await fleet(options=WorkerOptions(tick=1.0))
    await relay.ready()
    nursery.start_soon(relay.ask, BODY)
    await trio.sleep(2)
""",
        r"1 `relay.ask` had no answer when the test ended: await it, or cancel it",
    ),
    "a request that is left behind": (
        """
from dyn_testkit.client import begin
async def test_it(sim, fleet, relay, autojump_clock):
    await fleet(faults=[FaultPlan.of(Fault(at_token(3), STALL))])
    await relay.ready()
    connection = await sim.connect("relay", 30000)
    await begin(connection, "/generate", STREAM)
    await trio.sleep(1)
""",
        r"the request 'mine' was still live when the test ended: read its answer, or close its connection",
    ),
}


@pytest.mark.parametrize(("code", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistake(run, code, message):
    assert re.search(message, run(code, failed=1))


def test_a_test_that_fails_by_itself_is_not_blamed_for_its_faults(run):
    output = run(
        """
async def test_it(fleet):
    await fleet(faults=[CUT])
    assert 1 == 2
""",
        failed=1,
    )
    assert "assert 1 == 2" in output
    assert "never happened" not in output
