"""Fixtures for pytest-trio: mock workers, a proxy before them, and a network in memory; a seed for them all.

    async def test_my_router(fleet, relay, sim, autojump_clock): ...

`fleet`, `mock_worker` and `relay` are on real sockets, in real time; with `sim` among the arguments all of them are in
memory, in virtual time. `docs/testkit.md` has an example.

pytest loads this file for everybody who has the package installed, so it imports nothing that costs: the fixtures
themselves are in `fixtures.py`, which is imported by the first test that takes one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import subprocess
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from dyn_testkit.seed import VARIABLE, run_seed

if TYPE_CHECKING:
    from dyn_relay.net import Network
    from dyn_testkit.fixtures import AttendedRelay
    from dyn_testkit.fleet import Fleet
    from dyn_testkit.simnet import SimNetwork
    from dyn_testkit.worker import MockWorker


@dataclass(slots=True)
class Findings:
    """What the fixtures of a test find wrong; the test fails of it, unless it has failed already."""

    found: list[str] = field(default_factory=list)
    #: Called when the test's function returns, before pytest-trio cancels the test's nursery.
    at_return: list[Callable[[], list[str]]] = field(default_factory=list)


_FINDINGS = pytest.StashKey[Findings]()

#: The fixtures that run beside the test.
_BESIDE = ("mock_worker", "fleet", "relay", "sim", "dyn_network")

#: A mark, and the fixture that has its options.
_MARKED = {"dyn_worker": "mock_worker", "dyn_relay": "relay"}

_MARKERS = (
    "dyn_worker(**options): the worker of the fixture `mock_worker` (fields of dyn_testkit.worker.WorkerOptions)",
    "dyn_relay(**options): the proxy of the fixture `relay` (fields of dyn_relay.config.Config)",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option."""
    group = parser.getgroup("dyn-testkit")
    group.addoption("--dyn-seed", type=int, metavar="N", help=f"seed of simulations and properties ({VARIABLE}, 0)")


def pytest_configure(config: pytest.Config) -> None:
    """Markers; the option becomes the environment variable, for the processes of tests too."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    seed = config.getoption("--dyn-seed")
    if seed is not None:
        patch = pytest.MonkeyPatch()
        patch.setenv(VARIABLE, str(seed))
        config.add_cleanup(patch.undo)
    try:
        run_seed()
    except ValueError as exc:
        raise pytest.UsageError(str(exc)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell a mistake before any fixture is set up: pytest keeps one that stops on its way for all later tests."""
    if not isinstance(item, pytest.Function):
        return
    known = item._fixtureinfo.name2fixturedefs
    ours = [name for name in item.fixturenames if name in known and known[name][-1].func.__module__ == __name__]
    wrong = _misused(item, ours) or _mismarked(item, ours)
    if wrong:
        pytest.fail(f"{item.name}: {wrong}", pytrace=False)


def _misused(test: pytest.Function, ours: list[str]) -> str:
    """Why a test cannot use a fixture that runs beside it; "" if it can."""
    wanted = next((name for name in ours if name in _BESIDE), "")  # arguments come first, then their needs
    if not wanted:
        return ""
    if not test.config.pluginmanager.hasplugin("trio"):
        wrong = "needs pytest-trio: `pip install pytest-trio`"
    elif not _is_async(test):
        wrong = (
            f"runs beside the test: make it `async def {test.name}`. In a plain function, open what you need inside "
            "`trio.run`: `open_fleet` in dyn_testkit.fleet, `open_relay` in dyn_testkit.relay"
        )
    elif test.get_closest_marker("trio") is None:
        wrong = "needs a test that trio runs: mark it with `@pytest.mark.trio`, or set `trio_mode = true`"
    else:
        return ""
    return f"the fixture `{wanted}` {wrong}"


def _mismarked(test: pytest.Function, ours: list[str]) -> str:
    """What is wrong with a test's marks; "" for nothing."""
    for name, fixture in _MARKED.items():
        for mark in test.iter_markers(name):
            if mark.args:
                return f"the mark `{name}` takes its options by name, not {', '.join(map(repr, mark.args))}"
            known = _known_options(name)
            for option in mark.kwargs.keys() - known:
                close = difflib.get_close_matches(option, known, 1)
                return f"the mark `{name}` has no option {option!r}" + (f"; is it {close[0]!r}?" if close else "")
        if fixture not in ours and any(mark.name == name for mark in test.own_markers):
            return f"the mark `{name}` is for the fixture `{fixture}`, which the test does not take"
    return ""


def _known_options(mark: str) -> set[str]:
    if mark == "dyn_worker":
        from dyn_testkit.worker import WorkerOptions

        return {field.name for field in dataclasses.fields(WorkerOptions)}
    from dyn_relay.config import Config

    return {field.name for field in dataclasses.fields(Config)} - {"host", "port", "worker_urls"}


def _is_async(test: Any) -> bool:
    function = getattr(getattr(test.obj, "hypothesis", None), "inner_test", test.obj)
    return inspect.iscoroutinefunction(function)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test that passed, if its fixtures have found something."""
    findings = item.stash.get(_FINDINGS, None)
    if findings is not None and isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _asked_at_return(item.obj, findings)
    yield
    if findings is not None and findings.found:
        pytest.fail("\n".join(findings.found), pytrace=False)


def _asked_at_return(test: Callable[..., Any], findings: Findings) -> Callable[..., Any]:
    @functools.wraps(test)
    async def wrapped(**arguments: Any) -> None:
        await test(**arguments)
        for ask in findings.at_return:
            findings.found += ask()

    return wrapped


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure of what has a seed tells how to run it again."""
    report = yield
    if report.failed and "dyn_seed" in getattr(item, "fixturenames", ()):
        seed = run_seed()
        words = f"seed={seed} commit={_commit(item.config)}\npytest --dyn-seed {seed} '{item.nodeid}'"
        report.sections.append(("replay", words))
    return report


def _commit(config: pytest.Config) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=config.rootpath, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


@pytest.fixture(scope="session")
def dyn_seed() -> int:
    """The seed of this run: `--dyn-seed N`, or DYN_SEED. A test that takes it tells it when it fails."""
    return run_seed()


@pytest.fixture
async def dyn_network(dyn_seed: int, request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    """The network of the test: in memory if it takes `sim`, else real sockets."""
    from dyn_testkit import fixtures

    simulated = "sim" in request.fixturenames
    async with AsyncExitStack() as stack:
        yield await fixtures.network(stack, request.node.name, dyn_seed if simulated else None)


@pytest.fixture
async def sim(dyn_network: SimNetwork) -> SimNetwork:
    """The test's world in memory, from `dyn_seed`; its hosts are `client`, `relay`, and the workers `w1`, `w2`, ..."""
    return dyn_network


@pytest.fixture
def _findings(request: pytest.FixtureRequest) -> Findings:
    findings: Findings = request.node.stash.setdefault(_FINDINGS, Findings())
    return findings


@pytest.fixture
async def fleet(dyn_network: Network, _findings: Findings) -> AsyncIterator[Fleet]:
    """`await fleet(3)` starts three mock workers. Each fault in their plans must have happened by the test's end."""
    from dyn_testkit import fixtures

    async with fixtures.fleet(dyn_network, _findings) as workers:
        yield workers


@pytest.fixture
async def mock_worker(fleet: Fleet, request: pytest.FixtureRequest) -> MockWorker:
    """A running mock worker; `mock_worker.faults.add` gives it faults, the mark `dyn_worker` its options."""
    from dyn_testkit.worker import WorkerOptions

    [worker] = await fleet(options=WorkerOptions(**_options(request, "dyn_worker")))
    return worker


@pytest.fixture
async def relay(
    fleet: Fleet, dyn_network: Network, dyn_seed: int, _findings: Findings, request: pytest.FixtureRequest
) -> AsyncIterator[AttendedRelay]:
    """A running `dyn-relay`; all workers of `fleet` join it. `await relay.ready()`, then `await relay.ask(body)`."""
    from dyn_testkit import fixtures

    options = {"seed": dyn_seed} | _options(request, "dyn_relay")
    async with fixtures.relay(dyn_network, fleet, _findings, options) as running:
        yield running


def _options(request: pytest.FixtureRequest, marker: str) -> dict[str, Any]:
    """The options in all marks of this name, the nearest first."""
    found: dict[str, Any] = {}
    for mark in request.node.iter_markers(marker):
        found = {**mark.kwargs, **found}
    return found
