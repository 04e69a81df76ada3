"""Probes: what they change, and what they must leave alone."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from scripted_engines import Engines, claim, make_fleet, picked, running
from structlog.testing import capture_logs
from trio.testing import MockClock

from dyn_relay.fleet.worker import State
from dyn_relay.formats.traits import UNKNOWN

A, B = "http://a:1", "http://b:1"


async def test_the_first_good_probe_makes_a_worker_ready(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    engines[A].delay = 1.07
    async with running(engines) as fleet:
        (a,) = fleet.workers
        assert a.state is State.STARTING
        await trio.sleep(1.1)
        assert a.state is State.READY


async def test_a_worker_may_take_an_hour_to_start(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    engines[A].listening = False
    async with running(engines) as fleet:
        (a,) = fleet.workers
        await trio.sleep(4200)
        assert a.state is State.STARTING
        engines[A].listening = True
        await trio.sleep(1.1)
        assert a.state is State.READY


async def test_one_failed_probe_between_good_ones_changes_nothing(autojump_clock: MockClock) -> None:
    """B4."""
    engines = Engines(A)
    async with running(engines) as fleet:
        (a,) = fleet.workers
        await trio.sleep(1)  # probes come at 10, 20, ...
        for _ in range(4):
            engines[A].status = 503
            await trio.sleep(10)
            assert a.bad_probes == 1
            assert a.state is State.READY
            engines[A].status = 200
            await trio.sleep(10)
            assert a.bad_probes == 0


async def test_a_busy_engine_is_avoided_and_comes_back(autojump_clock: MockClock) -> None:
    """B1: health says 503 for a minute; new picks avoid it, its live streams (leases) are untouched."""
    engines = Engines(A, B)
    async with running(engines) as fleet:
        a, b = fleet.workers
        with claim(fleet, a):
            engines[A].status = 503
            await trio.sleep(35)
            assert a.state is State.UNREADY
            assert {picked(fleet) for _ in range(4)} == {b}
            assert a.in_flight == 1
            engines[A].status = 200
            await trio.sleep(5.5)
            assert a.good_probes == 1
            assert a.state is State.UNREADY  # one good probe is not enough
            await trio.sleep(1)
            assert a.state is State.READY


async def test_a_slow_probe_is_a_failed_one_and_they_never_overlap(autojump_clock: MockClock) -> None:
    """A4: an engine that accepts and never answers holds up nobody else's probes."""
    engines = Engines(A, B)
    async with running(engines, health_check_timeout_secs=25) as fleet:
        a, b = fleet.workers
        engines[A].delay = 1000
        await trio.sleep(119)
        assert a.state is State.UNREADY
        assert "more than 25 s" in a.cause
        assert b.state is State.READY
        assert len(engines.probes(B)) == 12
        assert engines.most_probes_at_once == 1


async def test_a_dead_worker_comes_back_by_itself(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    async with running(engines) as fleet:
        (a,) = fleet.workers
        engines[A].listening = False
        await trio.sleep(35)
        assert a.state is State.DEAD
        assert "refused" in a.cause
        await trio.sleep(3600)
        engines[A].listening = True
        await trio.sleep(12)
        assert a.state is State.READY


async def test_a_failed_request_hurries_a_probe_that_clears_the_worker(autojump_clock: MockClock) -> None:
    engines = Engines(A, B)
    engines[A].delay = 1.0
    async with running(engines) as fleet:
        a, _ = fleet.workers
        await trio.sleep(4)
        fleet.report(a, False, "reset", "cut")
        await trio.sleep(0.9)
        assert a.state is State.SUSPECT
        await trio.sleep(0.2)
        assert a.state is State.READY


async def test_a_worker_that_is_gone_is_dead_soon_after_its_first_cut(autojump_clock: MockClock) -> None:
    """The failed request counts as one failure; probes come each second until the threshold."""
    engines = Engines(A, B)
    async with running(engines) as fleet:
        a, b = fleet.workers
        engines[A].listening = False
        fleet.report(a, False, "end of stream", "cut")
        await trio.sleep(1.1)
        assert a.state is State.DEAD
        assert {picked(fleet) for _ in range(4)} == {b}


async def test_a_suspect_whose_probe_failed_is_not_let_back_in_by_time(autojump_clock: MockClock) -> None:
    engines = Engines(A, B)
    async with running(engines, inhibited_duration_secs=5, health_failure_threshold=10) as fleet:
        a, b = fleet.workers
        engines[A].status = 503
        fleet.report(a, False, "", "stall")
        await trio.sleep(6)
        assert a.state is State.SUSPECT
        assert {picked(fleet) for _ in range(4)} == {b}


async def test_a_probe_from_before_the_failure_does_not_clear_it(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    engines[A].delay = 2.0
    async with running(engines) as fleet:
        (a,) = fleet.workers
        await trio.sleep(2.1)
        await trio.sleep(10)  # a probe has been under way for 0.1 s
        assert engines.probing[A] == 1
        fleet.report(a, False, "", "cut")
        await trio.sleep(2)
        assert a.state is State.SUSPECT
        await trio.sleep(2)
        assert a.state is State.READY


async def test_a_hundred_cuts_make_one_extra_probe(mock_clock: MockClock) -> None:
    """B8: no thundering at the dead."""
    engines = Engines(A)
    async with running(engines) as fleet:
        (a,) = fleet.workers
        engines[A].listening = False
        before = len(engines.calls)
        for _ in range(100):
            fleet.report(a, False, "", "cut")
            await trio.testing.wait_all_tasks_blocked()
        assert len(engines.calls) == before + 1


async def test_asking_joins_one_fresh_probe(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    engines[A].delay = 1.0
    async with running(engines) as fleet:
        (a,) = fleet.workers
        await trio.sleep(5)
        before, asked = len(engines.probes(A)), trio.current_time()
        answers = []

        async def ask() -> None:
            answers.append(await fleet.ask(a))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ask)
        assert [answer.ok for answer in answers] == [True] * 10
        assert trio.current_time() - asked == pytest.approx(1.0)
        assert len(engines.probes(A)) == before + 1
        engines[A].listening = False
        answer = await fleet.ask(a)
        assert not answer.ok
        assert answer.refused


async def test_asking_about_a_probe_under_way_waits_for_the_next_one(autojump_clock: MockClock) -> None:
    """What began before the question may have been answered from before the trouble."""
    engines = Engines(A)
    engines[A].delay = 1.0
    async with running(engines) as fleet:
        (a,) = fleet.workers
        await trio.sleep(0.5)
        engines[A].delay = 3.0
        asked = trio.current_time()

        async def trouble() -> None:
            await trio.sleep(1.0)
            engines[A].status = 503

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trouble)
            assert not (await fleet.ask(a)).ok
        assert trio.current_time() - asked == pytest.approx(0.5 + 3.0)


async def test_a_probe_under_way_that_fails_is_an_answer(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    engines[A].delay = 1.0
    async with running(engines) as fleet:
        (a,) = fleet.workers
        await trio.sleep(0.5)
        engines[A].status = 503
        asked = trio.current_time()
        assert not (await fleet.ask(a)).ok
        assert trio.current_time() - asked == pytest.approx(0.5)


async def test_half_read_infos_do_not_replace_whole_ones(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    async with running(engines) as fleet:
        (a,) = fleet.workers
        known = a.traits
        assert known != UNKNOWN
        engines[A].info_delay = 60.0
        await trio.sleep(300)
        assert a.traits == known


async def test_one_question_about_a_life_sign_however_many_ask(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    async with running(engines) as fleet:
        (a,) = fleet.workers
        before = len(engines.infos(A))
        answers = []

        async def ask() -> None:
            answers.append(await fleet.lives(a))

        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(ask)
        assert answers == [True] * 100
        assert len(engines.infos(A)) == before + 1
        engines[A].listening = False
        await trio.sleep(5)
        assert not await fleet.lives(a)


async def test_asking_ends_when_the_worker_is_removed_or_the_fleet_ends(autojump_clock: MockClock) -> None:
    engines = Engines(A, B)
    for engine in engines.by_url.values():
        engine.delay = 10.0
    async with trio.open_nursery() as asking:

        async def ask(url: str) -> None:
            worker = fleet.get(url)
            assert worker is not None
            assert not (await fleet.ask(worker)).ok

        async with running(engines) as fleet:
            asking.start_soon(ask, A)
            asking.start_soon(ask, B)
            await trio.testing.wait_all_tasks_blocked()
            fleet.remove(A)
            await trio.testing.wait_all_tasks_blocked()
            assert len(asking.child_tasks) == 1
    with trio.fail_after(1):
        worker = fleet.get(B)
        assert worker is not None
        assert not (await fleet.ask(worker)).ok


async def test_traits_are_known_before_the_worker_is_used(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    async with running(engines) as fleet:
        (a,) = fleet.workers
        assert a.traits.weight_version == "v1"
        assert engines.calls[0].path == "/model_info"


async def test_a_restarted_worker_is_asked_again_before_it_is_used(autojump_clock: MockClock) -> None:
    """A15, H: the new process may have other weights."""
    engines = Engines(A)
    async with running(engines) as fleet:
        (a,) = fleet.workers
        engines[A].infos["/model_info"] = b"v2"
        fleet.report(a, False, "", "cut")
        await trio.testing.wait_all_tasks_blocked()
        assert (a.state, a.traits.weight_version) == (State.READY, "v2")


async def test_weights_that_change_in_place_are_noticed(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    async with running(engines) as fleet:
        (a,) = fleet.workers
        engines[A].infos["/model_info"] = b"v2"
        await trio.sleep(61)
        assert a.traits.weight_version == "v2"


@pytest.mark.parametrize(("status", "level"), [(404, "info"), (401, "error")])
async def test_a_worker_without_infos_is_usable(autojump_clock: MockClock, status: int, level: str) -> None:
    """L2: a refused key is loud and names the flag."""
    engines = Engines(A)
    engines[A].infos, engines[A].info_status = {}, status
    with capture_logs() as logs:
        async with running(engines) as fleet:
            (a,) = fleet.workers
            assert a.state is State.READY
            assert a.traits.weight_version is None
    loud = [entry for entry in logs if entry["log_level"] == "error"]
    assert bool(loud) == (level == "error")
    assert all("--worker-api-key" in entry["event"] for entry in loud)


async def test_infos_that_make_no_sense_do_not_end_the_probing(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    engines[A].infos["/model_info"] = b"nonsense"
    async with running(engines) as fleet:
        (a,) = fleet.workers
        assert a.state is State.READY
        await trio.sleep(59)
        assert len(engines.probes(A)) == 6


@pytest.mark.parametrize("key", [None, "s3cret"])
async def test_probes_carry_the_worker_key(autojump_clock: MockClock, key: str | None) -> None:
    """L2."""
    engines = Engines(A)
    async with running(engines, worker_api_key=key):
        pass
    expected = [(b"authorization", b"Bearer s3cret")] if key else []
    assert {call.path for call in engines.calls} == {"/health", "/model_info", "/server_info"}
    assert all(call.headers == expected for call in engines.calls)


async def test_asking_a_removed_worker(autojump_clock: MockClock) -> None:
    fleet = make_fleet(Engines(A))
    (a,) = fleet.workers
    fleet.remove(A)
    assert (await fleet.ask(a)).cause == "no longer probed"
