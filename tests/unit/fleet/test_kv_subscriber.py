"""Every batch once, in order, or from scratch (O4: gaps, restarts, late replays)."""

from __future__ import annotations

import trio.testing
from kv_kit import END, Publisher, following

settled = trio.testing.wait_all_tasks_blocked


async def test_batches_are_taken_in_as_they_come(autojump_clock):
    publisher = Publisher()
    async with following(publisher) as followed:
        for name in (b"a", b"b", b"c"):
            publisher.publish(name)
        await settled()
        assert followed.has == [b"a", b"b", b"c"]
        assert not followed.counts["gap"]


async def test_numbers_may_begin_at_one(autojump_clock):
    """O4: "expected seq 0, got 1" is no gap."""
    publisher = Publisher(first=1)
    async with following(publisher) as followed:
        publisher.publish(b"a")
        publisher.publish(b"b")
        await settled()
        assert followed.has == [b"a", b"b"]
        assert not followed.counts["gap"]


async def test_who_comes_late_asks_for_what_was_before(autojump_clock):
    """O4, cold start: what was published before is replayed, and is not taken in twice when it comes again."""
    publisher = Publisher()
    publisher.publish(b"a", sent=False)
    publisher.publish(b"b", sent=False)
    async with following(publisher) as followed:
        assert followed.has == [b"a", b"b"]
        publisher.send(1, b"b")  # it was on its way
        publisher.publish(b"c")
        await settled()
        assert followed.has == [b"a", b"b", b"c"]
        assert not followed.restarts


async def test_a_gap_is_filled_by_a_replay(autojump_clock):
    """O4: batch 2 is lost on the way."""
    publisher = Publisher()
    async with following(publisher) as followed:
        publisher.publish(b"a")
        publisher.publish(b"b")
        await settled()
        publisher.publish(b"c", sent=False)
        publisher.publish(b"d")
        publisher.publish(b"e")
        await settled()
        assert followed.has == [b"a", b"b", b"c", b"d", b"e"]
        assert (followed.counts["gap"], followed.counts["lost"]) == (1, 0)
        assert publisher.asked[-1] == 1, "a replay begins with the last batch that is there, to know it again"


async def test_a_gap_that_nothing_fills_drops_everything(autojump_clock):
    """O4: the batch is gone for good; whatever was known may have been removed in it."""
    publisher = Publisher()
    async with following(publisher) as followed:
        publisher.publish(b"a")
        await settled()
        publisher.publish(b"b", sent=False, kept=False)
        publisher.publish(b"c")
        publisher.publish(b"d")
        await settled()
        assert followed.has == [b"c", b"d"]
        assert (followed.counts["gap"], followed.counts["lost"]) == (1, 1)


async def test_a_gap_at_a_publisher_without_replays(autojump_clock):
    publisher = Publisher()
    async with following(publisher, replays=False) as followed:
        publisher.publish(b"a")
        publisher.publish(b"b", sent=False)
        publisher.publish(b"c")
        await settled()
        assert followed.has == [b"c"]
        assert not publisher.asked


async def test_a_number_that_goes_down_is_a_new_process(autojump_clock):
    """O4: skip batch 5, then restart at 0."""
    publisher = Publisher()
    async with following(publisher) as followed:
        for number in range(8):
            publisher.publish(b"old %d" % number, sent=number != 5)
        await settled()
        assert len(followed.has) == 8
        publisher.restart()
        publisher.publish(b"new 0")
        await settled()
        assert followed.has == [b"new 0"]
        assert followed.restarts == followed.counts["restarted"] == 1
        publisher.publish(b"new 1")
        await settled()
        assert followed.has == [b"new 0", b"new 1"]


async def test_a_new_process_that_has_overtaken_the_old_count(autojump_clock):
    """Its first batch to arrive has a higher number: only the replay tells that the one before is another's."""
    publisher = Publisher()
    async with following(publisher) as followed:
        publisher.publish(b"old 0")
        publisher.publish(b"old 1")
        await settled()
        publisher.restart()
        for number in range(4):
            publisher.publish(b"new %d" % number, sent=number == 3)
        await settled()
        assert followed.has == [b"new %d" % number for number in range(4)]
        assert followed.restarts == 1
        publisher.restart()
        publisher.publish(b"newest 0")
        await settled()
        assert followed.has == [b"newest 0"]
        assert followed.restarts == 2


async def test_a_new_process_after_a_replay_and_before_any_batch(autojump_clock):
    """What the subscription brings first is below the replayed count: an echo of it, or another process."""
    publisher = Publisher()
    for number in range(5):
        publisher.publish(b"old %d" % number, sent=False)
    async with following(publisher) as followed:
        publisher.restart()
        publisher.publish(b"new 0")
        await settled()
        assert followed.has == [b"new 0"]
        assert followed.restarts == 1


async def test_silence_is_looked_into(autojump_clock):
    """The last batch before a silence was lost: no later one shows the gap."""
    publisher = Publisher()
    async with following(publisher) as followed:
        publisher.publish(b"a")
        publisher.publish(b"b", sent=False)
        await trio.sleep(30)
        assert followed.has == [b"a", b"b"]
        publisher.restart()
        await trio.sleep(30)
        assert (followed.has, followed.restarts) == ([], 1)
        publisher.publish(b"new", sent=False)
        await trio.sleep(30)
        assert followed.has == [b"new"]
        assert followed.restarts == 1


async def test_a_publisher_that_keeps_nothing_is_not_taken_for_a_new_process(autojump_clock):
    publisher = Publisher()
    async with following(publisher) as followed:
        publisher.publish(b"a", kept=False)
        await trio.sleep(60)
        assert len(publisher.asked) > 5
        assert (followed.has, followed.restarts) == ([b"a"], 0)


async def test_a_new_connection_may_be_a_new_process(autojump_clock):
    """Its next batch to arrive has just the number that is expected."""
    publisher = Publisher()
    async with following(publisher) as followed:
        publisher.publish(b"old 0")
        await settled()
        publisher.restart()
        publisher.publish(b"new 0", sent=False)
        publisher.raw([])
        publisher.publish(b"new 1")
        await settled()
        assert followed.has == [b"new 0", b"new 1"]
        assert followed.restarts == 1


async def test_a_new_connection_and_no_replay_may_be_a_new_process(autojump_clock):
    """O4: it could not be asked, so nothing of before may stay."""
    publisher = Publisher()
    for payload in (b"old0", b"old1", b"old2"):
        publisher.publish(payload, sent=False)
    async with following(publisher) as follower:
        publisher.restart()
        publisher.silent = True
        publisher.raw([])  # the connection breaks
        await trio.sleep(7)
        publisher.publish(b"new0")
        await trio.sleep(7)
        publisher.silent = False
        publisher.publish(b"new1")
        await trio.sleep(7)
        assert follower.has == [b"new0", b"new1"]


async def test_a_late_replay_reaches_nobody(autojump_clock):
    """O4: late replays must not resurrect what was removed meanwhile."""
    publisher = Publisher()
    async with following(publisher) as followed:
        publisher.publish(b"store", kept=False)
        await settled()
        publisher.silent = True
        publisher.publish(b"lost", sent=False, kept=False)
        publisher.publish(b"removed")  # asks for the gap, in vain
        await trio.sleep(6)
        publisher.silent = False
        assert followed.counts["timeout"] == 1
        assert followed.has == [b"removed"]
        # An answer that repeats what is known, old batches last.
        again = [[b"", b"t", number.to_bytes(8), payload] for number, payload in ((2, b"removed"), (0, b"store"))]
        publisher.instead.append([*again, [b"", b"", END.to_bytes(8), b""]])
        await trio.sleep(20)
        assert publisher.asked.count(2) >= 1
        assert followed.has == [b"removed"]


async def test_what_is_no_batch_is_left_out(autojump_clock):
    publisher = Publisher()
    async with following(publisher) as followed:
        publisher.raw([b"t"])
        publisher.raw([b"t", b"1", b"x"])
        publisher.send(77, b"not ours", topic=b"topic")
        publisher.publish(b"a")
        await settled()
        assert followed.has == [b"a"]
        assert followed.counts["garbage"] == 2
        publisher.instead.append([[b""], [b"", b"t", b"1", b""], [b"", b"", END.to_bytes(8), b""]])
        await trio.sleep(11)
        assert followed.has == [b"a"]
        assert followed.counts["garbage"] == 4
