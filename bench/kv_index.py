"""What the prefix index costs: bytes a cached block, time to store and remove one, time to look up a long prompt.

    python bench/kv_index.py [--blocks 10000000] [--ranks 64] [--sharers 1]

Blocks are of 16 tokens, in prompts of 2,048 blocks. `--sharers`: how many ranks have each of them. What is printed as
memory is what the process holds more than before, in bytes a block; the rest is CPU time of the steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from array import array
from pathlib import Path

from dyn_relay.fleet.kv.events import Removed, Stored
from dyn_relay.fleet.kv.index import PrefixIndex, RankId

SIZE, LENGTH = 16, 2048


def resident() -> int:
    """Bytes of memory that the process holds."""
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


def prompt(number: int) -> list[int]:
    """32,768 token ids."""
    return random.Random(f"tokens {number}").choices(range(150_000), k=SIZE * LENGTH)


def names(number: int) -> list[int]:
    """What an engine calls its blocks."""
    return list(array("q", random.Random(f"names {number}").randbytes(8 * LENGTH)))


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--sharers", type=int, default=1)
    given = parser.parse_args()
    prompts = max(1, given.blocks // LENGTH)
    index = PrefixIndex(2 * given.blocks, random.Random(1))
    ranks = [index.join(RankId("w", number)) for number in range(given.ranks)]
    gc.collect()
    before, storing, worst = resident(), 0.0, 0.0
    for number in range(prompts):
        event = Stored(names(number), None, list(prompt(number)), SIZE)
        for sharer in range(given.sharers):
            began = time.process_time()
            index.apply(ranks[(number + sharer) % given.ranks], [event])
            took = time.process_time() - began
            storing, worst = storing + took, max(worst, took)
    gc.collect()
    held = resident() - before
    lookups, empty = [], []
    for number in range(0, prompts, max(1, prompts // 50)):
        known, unknown = prompt(number), prompt(prompts + number)
        began = time.process_time()
        found = index.match(index.chain(known, SIZE))
        lookups.append(time.process_time() - began)
        assert len(found) == given.sharers
        assert {sum(blocks) for blocks in found.values()} == {LENGTH}
        began = time.process_time()
        index.match(index.chain(unknown, SIZE))
        empty.append(time.process_time() - began)
    began = time.process_time()
    index.apply(ranks[0], [Removed(list(reversed(names(0))))])
    removing = (time.process_time() - began) / LENGTH
    began = time.process_time()
    index.leave(ranks[1])
    leaving = time.process_time() - began
    blocks = prompts * LENGTH
    told = {
        "blocks": blocks,
        "ranks": given.ranks,
        "sharers": given.sharers,
        "bytes_per_block": round(held / blocks, 1),
        "store_us_per_block": round(storing / blocks / given.sharers * 1e6, 2),
        "worst_store_ms_of_2048": round(worst * 1e3, 1),
        "remove_us_per_block": round(removing * 1e6, 2),
        "lookup_32k_ms": round(statistics.median(lookups) * 1e3, 2),
        "lookup_32k_unknown_ms": round(statistics.median(empty) * 1e3, 2),
        "leave_ms": round(leaving * 1e3, 2),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
