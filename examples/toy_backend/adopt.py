"""What it takes to ask the laws of another backend: its wire, a way to observe it, and cases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import trio
from hypothesis import strategies as st
from trio.testing import MockClock

from dyn_testkit import faults
from dyn_testkit.client import Response, fetch
from dyn_testkit.engine import Sampling, generate
from dyn_testkit.laws import Attempt, Case, Observed, Reading
from dyn_testkit.laws.cases import plans
from dyn_testkit.simnet import Link, SimNetwork
from dyn_testkit.strategies import fragmentations, prompts
from examples.toy_backend.router import Router
from examples.toy_backend.worker import MODEL, serve

MOST = 12
WORKERS = 4


class Lines:
    """How a request and an answer are spelled. Implements `Wire`."""

    def prompt(self, body: bytes) -> list[int]:
        return list(json.loads(body)["prompt"])

    def budget(self, body: bytes) -> int:
        return int(json.loads(body)["n"])

    def own(self, body: bytes) -> Mapping[str, Any]:
        return {name: value for name, value in json.loads(body).items() if name not in ("prompt", "n")}

    def read(self, response: Response) -> Reading:
        values = [json.loads(line) for line in response.body.split(b"\n")[:-1]]
        tokens = [token for value in values for token in value.get("t", ())]
        said = {name: value for line in values for name, value in line.items()}
        return Reading(tokens, said.get("end"), said.get("error"), response.complete and "end" in said)


LINES = Lines()


def whole(seen: Observed) -> Reading:
    """What an uninterrupted run gives."""
    asked = seen.request
    steps = list(generate(MODEL, asked["prompt"], Sampling(max_new_tokens=asked["n"], temperature=0)))
    finish = steps[-1].finish if steps else None
    return Reading([step.token for step in steps], finish["type"] if finish else "length", complete=True)


def observe(case: Case, router: type[Router] = Router) -> Observed:
    """Run one case, in no real time."""
    return trio.run(partial(_observe, case, router), clock=MockClock(autojump_threshold=0))


async def _observe(case: Case, router: type[Router]) -> Observed:
    network, attempts = SimNetwork(link=Link(fragmentation=case.fragmentation)), list[Attempt]()
    async with trio.open_nursery() as nursery:
        workers = [(f"w{number}", 1) for number in range(WORKERS)]
        for address in workers:
            nursery.start_soon(serve, await network.listen(*address), case, attempts)
        nursery.start_soon(router(network, workers).serve, await network.listen("router", 1))
        response = await fetch(network, "http://router:1", "/", case.body)
        nursery.cancel_scope.cancel()
    return Observed(case, response, attempts)


def cases(most_faults: int = WORKERS - 1) -> st.SearchStrategy[Case]:
    """Requests, and cuts at every place that this wire has."""
    place = st.one_of(
        st.builds(faults.at_token, st.integers(1, 3)),
        st.builds(faults.at_token, st.integers(0, MOST)),
        st.sampled_from([faults.AT_HEAD, faults.AFTER_LAST_TOKEN, faults.AFTER_FINISH]),
    )
    fields = {"prompt": prompts(MODEL), "n": st.integers(1, MOST), "by": st.integers(1, 3)}
    body = st.fixed_dictionaries(fields).map(lambda value: json.dumps(value).encode())
    plan = plans(most=most_faults, where=place)
    return st.builds(Case, body, plan, fragmentation=fragmentations(), wire=st.just(LINES))
