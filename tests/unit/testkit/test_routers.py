"""`check_router`: this project's proxy keeps the laws, and a router's mistake is found by the law that is about it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from tests.unit.testkit import toy_routers as toys

from dyn_relay.sockets import open_network
from dyn_testkit.routers import LAWS, LawsBroken, NoRouter, check_router, trials
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.simulation.router import relay

#: A fleet of one dialect, and workers that come back at once.
FLEETS = (("incremental",) * 4,)
SETTINGS = {"health_success_threshold": 1, "inhibited_duration_secs": 0.0}


async def toy(router, **options):
    network = SimNetwork(1)
    checked = partial(check_router, partial(router.serve, network), network=network, fleets=FLEETS)
    return await checked(raise_on_broken=False, **options)


async def test_this_proxy_keeps_all_laws(autojump_clock):
    network = SimNetwork(1)

    def before(workers):
        return relay(network, "proxy", workers, 1, SETTINGS)

    fleets = (("cumulative", "incremental", "mixed", "incremental"),)
    report = await check_router(before, network=network, fleets=fleets, examples=20)
    assert report.held == list(LAWS)
    assert report.tells
    assert report.continued > 20


async def test_this_proxy_over_real_sockets():
    async with open_network() as network:

        def before(workers):
            return relay(network, "127.0.0.1", workers, 1, SETTINGS)

        report = await check_router(before, network=network, fleets=FLEETS, only=["equivalence", "budget", "fold"])
    assert report.held == ["equivalence", "budget", "fold"]


async def test_an_honest_proxy_breaks_nothing_but_equivalence(autojump_clock):
    report = await toy(toys.Honest)
    assert list(report.broken) == ["equivalence"]
    assert report.continued == 0
    assert "0 requests were continued" in report.summary()


FOUND = {
    toys.Splices: "equivalence",
    toys.EndsCleanly: "no false success",
    toys.DropsTheLastToken: "passthrough",
    toys.RetriesRefusals: "passthrough",
    toys.AsksForAllAgain: "budget",
    toys.ContinuesEverything: "admission",
    toys.TakesReadsForEvents: "passthrough",
    toys.ReadsOnce: "passthrough",
    toys.Hangs: "liveness",
    toys.Buffers: "liveness",
    toys.Stays: "liveness",
    toys.Undelimited: "no false success",
}


@pytest.mark.parametrize(("router", "law"), FOUND.items(), ids=[router.__name__ for router in FOUND])
async def test_a_mistake_is_found(autojump_clock, router, law):
    report = await toy(router, only=[law], counterexamples=1)
    assert list(report.broken) == [law]
    assert report.outcomes[law].examples[0].startswith(f"{law}: ")


@pytest.mark.parametrize(("router", "held"), [(toys.Honest, ["equivalence"]), (toys.Confuses, [])])
async def test_requests_at_the_same_time(autojump_clock, monkeypatch, router, held):
    monkeypatch.setitem(LAWS, "equivalence", replace(LAWS["equivalence"], trials=trials.crowded))
    assert (await toy(router, only=["equivalence"])).held == held


async def test_in_memory_the_same_call_has_the_same_verdict(autojump_clock):
    """Also about a router that depends on the order in which trio runs its tasks."""
    reports = [await toy(toys.Undecided, only=["passthrough"], start_timeout=600) for _ in range(3)]
    found = [report.outcomes["passthrough"] for report in reports]
    assert 0 < found[0].broken < found[0].trials
    assert found[0] == found[1] == found[2]


async def test_broken_laws_are_raised_with_the_whole_story(autojump_clock):
    network = SimNetwork(1)
    with pytest.raises(LawsBroken, match=r"(?s)law 8, no false success: .*broken in .* trials.*Case\(") as raised:
        await check_router(
            partial(toys.EndsCleanly.serve, network), network=network, fleets=FLEETS, only=["no false success"]
        )
    assert list(raised.value.report.broken) == ["no false success"]


async def test_a_counter_example_is_made_smaller(autojump_clock):
    """What is lost without any fault, from any request, needs neither fault nor option to be shown."""
    report = await toy(toys.DropsTheLastToken, only=["equivalence"], counterexamples=1)
    (example,) = report.outcomes["equivalence"].examples
    assert "faults=()" in example
    assert "logprob" not in example.splitlines()[1]


async def test_a_router_that_hangs_ends_the_run(autojump_clock):
    """What had been seen by then counts; laws that have not seen all their trials are not said to hold."""
    report = await toy(toys.Hangs, counterexamples=3)
    assert "liveness" in report.broken
    assert report.outcomes["liveness"].broken == 3
    assert report.not_run["budget"] == "3 requests hung"
    assert report.held == []


@pytest.mark.parametrize(
    ("factory", "error", "words"),
    [
        (lambda: None, TypeError, "argument"),
        (lambda workers: "http://router:30000", TypeError, "must return an async context manager"),
        (toys.Honest.serve(None, ()), TypeError, "is a context manager; give a function"),
        ("http://router:30000", TypeError, "must be a function of the workers' URLs"),
    ],
)
async def test_a_factory_that_is_none(autojump_clock, factory, error, words):
    with pytest.raises(error, match=words):
        await check_router(factory, network=SimNetwork(1))


class Nothing:
    """What a factory may yield by mistake."""

    def __init__(self, url):
        self.url = url

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("http://nobody:1", NoRouter, "does not route to its workers: .* could not be reached"),
        ("ftp://router", ValueError, "the router's url must be"),
        (None, TypeError, "must yield a URL"),
    ],
)
async def test_nobody_there(autojump_clock, url, error, words):
    with pytest.raises(error, match=words):
        await check_router(lambda workers: Nothing(url), network=SimNetwork(1))


async def test_wrong_arguments(autojump_clock):
    network = SimNetwork(1)
    with pytest.raises(ValueError, match="there is no law 'budgets'; is it budget"):
        await check_router(partial(toys.Honest.serve, network), only=["budgets"])
    for fleets in (["incremental"], [("mixd",)]):
        with pytest.raises(ValueError, match=r"fleets= has fleets of .*, not of '(i|mixd)'"):
            await check_router(partial(toys.Honest.serve, network), network=network, fleets=fleets)
    with pytest.raises(ValueError, match="at least one fleet"):
        await check_router(partial(toys.Honest.serve, network), fleets=[])
