"""Synchronous code that takes turns with trio."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit.stepwise import Stepwise


@pytest.fixture
def stepwise():
    made = Stepwise(0)
    yield made
    made.close()


async def now():
    return trio.current_time()


def test_no_time_passes_between_two_steps(stepwise):
    heard = []

    async def tick():
        while True:
            await trio.sleep(1)
            heard.append(await now())

    async def begin():
        stepwise.nursery.start_soon(tick)

    began = stepwise.step(now)
    stepwise.step(begin)
    assert [stepwise.step(now) for _ in range(3)] == [began] * 3
    assert not heard
    stepwise.step(trio.sleep, 3.5)
    assert heard == [began + 1, began + 2, began + 3]


def test_what_a_step_raises(stepwise):
    async def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        stepwise.step(fail)
    with pytest.raises(trio.TooSlowError):
        stepwise.step(trio.sleep_forever, within=5)
    assert stepwise.step(now) >= 5


def test_a_crash_in_the_background_ends_the_run():
    stepwise = Stepwise(0)

    async def crash():
        await trio.sleep(1)
        raise KeyError("mine")

    async def begin():
        stepwise.nursery.start_soon(crash)

    stepwise.step(begin)
    with pytest.raises(ExceptionGroup) as caught:
        stepwise.step(trio.sleep, 2)
    assert caught.group_contains(KeyError, match="mine")
    with pytest.raises(RuntimeError, match="the run has ended"):
        stepwise.step(now)
    stepwise.close()
    assert trio.run(now) >= 0


def test_order_comes_from_the_seed():
    def order(seed):
        stepwise, heard = Stepwise(seed), []

        async def say(number):
            await trio.sleep(1)
            heard.append(number)

        async def all_at_once():
            async with trio.open_nursery() as nursery:
                for number in range(9):
                    nursery.start_soon(say, number)

        for _ in range(4):
            stepwise.step(all_at_once)
        stepwise.close()
        return heard

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1
