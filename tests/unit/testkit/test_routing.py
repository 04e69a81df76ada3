"""The replay of traces: what the engines' model keeps, and that policies are told apart by what they reuse."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from dyn_relay.config import Config
from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_relay.fleet.target import Target
from dyn_testkit.routing import BLOCK, Call, Hardware, make, read, replay, write
from dyn_testkit.routing.replay import percentile

SAMPLE = Path(__file__).parents[3] / "bench" / "traces" / "sample.jsonl.gz"
#: So small that what the sample shares cannot be kept everywhere.
HARDWARE = Hardware(cache_blocks=4000)


def test_the_sample_is_what_is_drawn() -> None:
    assert list(read(SAMPLE)) == make(1000, 15.0, 1)


def test_a_trace_is_read_as_written(tmp_path: Path) -> None:
    calls = make(50, 5.0, 3, "agents")
    for name in ("a.jsonl", "a.jsonl.gz"):
        write(tmp_path / name, calls)
        assert list(read(tmp_path / name)) == calls
    (tmp_path / "other").write_text('{"version": 2}\n')
    (tmp_path / "none").write_text("")
    for name in ("other", "none"):
        with pytest.raises(ValueError, match="no trace"):
            list(read(tmp_path / name))


def test_turns_go_on_where_they_were() -> None:
    """A session's prompt begins with the one before it and its answer; and its key stays."""
    calls = make(300, 5.0, 1, "agents")
    later = [call for call in calls if call.after is not None]
    assert len(later) > 200
    for call in later:
        before = calls[call.after]  # type: ignore[index]
        assert call.prompt_blocks[: len(before.prompt_blocks + before.answer_blocks)] == (
            before.prompt_blocks + before.answer_blocks
        )
        assert call.key == before.key != ""


def test_a_trainers_step() -> None:
    """64 prompts with 8 samples each, at once; one instruction before them all."""
    step = [call for call in make(1000, 10.0, 1, "rl") if call.at == 0]
    assert len(step) == 512
    assert len({call.prompt for call in step}) == 64
    assert len({call.answer for call in step}) == 512
    assert len({call.prompt[0] for call in step}) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_gives_the_same(policy: str) -> None:
    calls = make(600, 15.0, 2, "agents")
    one, other = (replay(calls, policy, engines=4, hardware=HARDWARE, seed=5) for _ in range(2))
    assert one == other
    assert one.requests == len(calls)
    assert sum(one.shares.values()) == len(calls)


def test_who_reuses_more() -> None:
    """The recorded shapes: what is known of prompts is worth twice what chance finds, and makes no hot spot."""
    calls = list(read(SAMPLE))
    found = {
        name: replay(calls, name, hardware=HARDWARE) for name in ("round_robin", "consistent_hashing", "cache_aware")
    }
    rates = {name: result.hit_rate for name, result in found.items()}
    assert rates["cache_aware"] > rates["consistent_hashing"] > rates["round_robin"]
    assert rates["cache_aware"] > rates["round_robin"] + 0.25
    assert percentile(found["cache_aware"].spreads, 0.99) <= 16
    assert percentile(found["cache_aware"].waits, 0.99) <= percentile(found["round_robin"].waits, 0.99)


def test_samples_of_a_prompt_meet_but_do_not_pile_up() -> None:
    """The RL shape alone, twice: 8 samples of a prompt reuse it, and every engine works."""
    calls = make(1024, 4.0, 1, "rl")
    aware, turns = (replay(calls, name, engines=8) for name in ("cache_aware", "round_robin"))
    assert aware.hit_rate > 0.75
    assert turns.hit_rate < 0.25
    assert max(aware.shares.values()) < 1.3 * min(aware.shares.values())


class Mirror:
    """What the engines' events say that they have."""

    def __init__(self, hardware: Hardware) -> None:
        self.held: dict[str, set[int]] = {}
        self.evicted = 0
        self._hardware = hardware

    def stored(self, target: Target, blocks: Sequence[int], parent: int | None, tokens: array[int]) -> None:
        held = self.held.setdefault(target.id, set())
        assert parent is None or parent in held
        assert list(tokens) == [block for block in blocks for _ in range(BLOCK)]
        assert not held & set(blocks)
        held.update(blocks)

    def removed(self, target: Target, blocks: Sequence[int]) -> None:
        assert set(blocks) <= self.held[target.id]
        self.held[target.id] -= set(blocks)
        self.evicted += len(blocks)


def test_what_engines_say_of_their_caches() -> None:
    """Each block is stored once after its parent, and removed before it is stored again; what is held has room."""
    calls = make(600, 10.0, 1)
    mirrors: list[Mirror] = []

    def listening(policy: object) -> Mirror:
        mirrors.append(Mirror(HARDWARE))
        return mirrors[-1]

    result = replay(calls, "cache_aware", engines=4, hardware=HARDWARE, listening=listening)
    (mirror,) = mirrors
    assert set(mirror.held) == set(result.shares)
    assert all(len(held) <= HARDWARE.cache_blocks for held in mirror.held.values())
    assert mirror.evicted > 1000


def test_an_engine_keeps_what_was_used_last() -> None:
    """By hand: room for six blocks; the end of the older prompt goes first."""
    calls = [
        Call(0.0, ((0, 3),), ((3, 1),)),
        Call(100.0, ((10, 2),), ((12, 1),)),
        Call(200.0, ((0, 4),), ((4, 1),)),  # 0, 1, 2 are there, 3 had to go
        Call(300.0, ((10, 2),), ((20, 1),)),  # for it 12 and 11 had to go, 10 is there
    ]
    result = replay(calls, "round_robin", engines=1, hardware=Hardware(cache_blocks=6))
    assert result.prompt_tokens == 11 * BLOCK
    assert result.reused_tokens == 4 * BLOCK


def test_a_waits_b_in_the_model() -> None:
    """One slot: the second begins when the first has ended; the third's turn when the second has."""
    hardware = Hardware(slots=1, prefill_rate=BLOCK, token_secs=1 / BLOCK, slowdown=1.0)
    calls = [
        Call(0.0, ((0, 2),), ((2, 3),)),
        Call(0.0, ((10, 1),), ((11, 1),)),
        Call(4.0, ((20, 1),), ((21, 1),), after=0),
    ]
    result = replay(calls, "round_robin", engines=1, hardware=hardware)
    assert result.waits == [2.0, 6.0, 1.0]
    assert result.seconds == 11.0


def test_a_turn_that_never_comes_is_told() -> None:
    with pytest.raises(ValueError, match="never ends"):
        replay([Call(0.0, ((0, 1),), ((1, 1),)), Call(0.0, ((0, 1),), (), after=7)], "random")


def test_the_guard_is_the_configurations() -> None:
    calls = make(1024, 10.0, 1, "rl")
    tight = Config(balance_abs_threshold=1, balance_rel_threshold=1.0, cache_threshold=0.0)
    loose, held = (replay(calls, "cache_aware", engines=8, config=config) for config in (Config(), tight))
    assert percentile(held.spreads, 0.99) <= percentile(loose.spreads, 0.99)
    assert held.reused_tokens < loose.reused_tokens
