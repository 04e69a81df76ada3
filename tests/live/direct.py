"""Engines that the proxy reaches by gRPC: what its clients see is what the same engine's HTTP server sends.

Deaths are the other cases', in the `grpc` flavours; here is everything that needs none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import trio
from answers import Target, address, ask, differences, freed, told
from lab import FLAVOURS, Lab, flush
from record import PROMPT, bodies, texts

from dyn_chaos import load
from dyn_chaos.audit import listed
from dyn_chaos.engines import Server, StockServer
from dyn_chaos.report import Outcome

#: Seconds in which an engine must be free of a request that nobody wants any more.
FREE = 2.0
#: Its orders, by path; one that it cannot follow.
ORDERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/pause_generation", {"mode": "retract"}),
    ("/continue_generation", {}),
    ("/flush_cache", {}),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}),
)
#: What of an engine's answers to GET is asked of the proxy.
INFOS = ("/model_info", "/v1/models")
#: Told by HTTP alone, or measured.
UNTOLD = ("preferred_sampling_params", "has_image_understanding", "has_audio_understanding")
#: Requests of `texts` that gRPC cannot carry, and the field that is named.
UNCARRIED = {"text-logprobs": "return_text_in_logprobs"}
#: The engine's HTTP server says to browsers that its answer depends on where they come from.
CORS = "vary"


def post(path: str, body: dict[str, Any]) -> bytes:
    """A request on a connection of its own."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def probed(lab: Lab, relay: Server, engine: StockServer, outcome: Outcome) -> None:
    """The proxy has found out what it stands before, and says of it what the engine says of itself."""
    async with load.client() as http:
        while not (worker := (await listed(http, relay.url))[0])["is_healthy"]:  # noqa: ASYNC110 - another process
            await trio.sleep(0.1)
        outcome.expect(worker["url"] == engine.grpc, "probe", str(worker))
        outcome.facts["the worker"] = {name: told for name, told in worker["traits"].items() if told is not None}
        for path in INFOS:
            here, there = [(await http.get(f"{url}{path}")).json() for url in (relay.url, engine.url)]
            for name in sorted(here.keys() & there.keys()) if isinstance(there, dict) else ():
                if name not in UNTOLD:
                    outcome.expect(here[name] == there[name], "info", f"{path} {name}: {here[name]}, not {there[name]}")


async def same(lab: Lab, relay: Server, engine: StockServer, outcome: Outcome) -> None:
    """Every kind of request, and every refusal, over gRPC and over HTTP."""
    deltas = "incremental" in lab.flavour  # then the last event depends on how many there were
    compared = 0
    for name, body in [*bodies(), *(texts() if FLAVOURS[lab.flavour].text else ())]:
        for streams in (False,) if deltas and not name.startswith("error") else (False, True):
            asked = {**body, "stream": streams}
            if name in UNCARRIED:
                answer = await ask(Target("ours", *address(relay.url)), post("/generate", asked))
                refused = answer.status == 400 and UNCARRIED[name].encode() in answer.body
                outcome.expect(refused, "uncarried", f"{answer.status} {answer.body[:200]!r}", name)
                continue
            await _compared(relay, engine, name, asked, outcome)
            compared += 1
    outcome.facts["requests asked of both"] = compared


async def fallen_back(lab: Lab, engine: StockServer, outcome: Outcome) -> None:
    """What gRPC cannot carry, where it may go to the engine's HTTP port."""
    every = dict([*bodies(), *texts()])
    async with trio.open_nursery() as nursery:
        relay = await lab.relay(nursery, [engine], "direct-fallback", ("--http-fallback",))
        for name in UNCARRIED if FLAVOURS[lab.flavour].text else ():
            for streams in (False, True):
                await _compared(relay, engine, name, {**every[name], "stream": streams}, outcome)
        nursery.cancel_scope.cancel()


async def _compared(relay: Server, engine: StockServer, name: str, body: dict[str, Any], outcome: Outcome) -> None:
    answers = []
    for target in (Target("direct", *address(engine.url)), Target("ours", *address(relay.url))):
        rid = {"rid": f"{body['rid']}-{body['stream']}-{target.name}"} if "rid" in body else {}
        await flush(engine.url)
        response = await ask(target, post("/generate", body | rid))
        answers.append(told(response, f"-{target.name}", by_chance=False))
        answers[-1]["headers"].pop(CORS, None)
    found = list(differences(*answers))
    outcome.expect(not found, "answer", "; ".join(found), f"{name}, {'streaming' if body['stream'] else 'unary'}")


async def aborted(lab: Lab, relay: Server, engine: StockServer, outcome: Outcome) -> None:
    """A client aborts its stream and its unary request: both end as over HTTP, and the engine is free."""
    for streams in (True, False):
        rid = f"abort-{lab.flavour}-{streams}"
        answers: list[httpx.Response] = []
        async with load.client() as http, trio.open_nursery() as nursery:
            nursery.start_soon(endless, http, relay.url, {"rid": rid, "stream": streams}, answers)
            await working(http, engine)
            told_at = trio.current_time()
            await http.post(f"{relay.url}/abort_request", json={"rid": rid})
        took = trio.current_time() - told_at
        [answer] = answers
        last = answer.text.split("\n\n")[-3].removeprefix("data: ") if streams else answer.text
        meta = json.loads(last)["meta_info"]
        outcome.expect(meta["finish_reason"]["type"] == "abort", "abort", last[-300:], rid)
        said = f"{answer.status_code} after {took * 1e3:.0f} ms with {meta['completion_tokens']} tokens"
        outcome.facts[f"abort, {'streaming' if streams else 'unary'}"] = said
        await idle(engine, outcome, rid)


async def endless(http: httpx.AsyncClient, url: str, body: dict[str, Any], answers: list[httpx.Response]) -> None:
    """Ask for more tokens than the case has patience for."""
    sampling = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    answers.append(await http.post(f"{url}/generate", json={"input_ids": PROMPT, "sampling_params": sampling, **body}))


async def left(lab: Lab, relay: Server, engine: StockServer, outcome: Outcome) -> None:
    """A client goes away."""
    for streams in (True, False):
        took = await freed(Target("ours", *address(relay.url)), Target("direct", *address(engine.url)), stream=streams)
        outcome.facts[f"left, {'streaming' if streams else 'unary'}"] = f"free after {took or FREE:.2f} s"
        outcome.expect(took is not None and took < FREE, "slots", f"free after {took} s")


async def ordered(lab: Lab, relay: Server, engine: StockServer, outcome: Outcome) -> None:
    """What a trainer tells its engines: this one hears it, and its answer comes back among all workers' answers."""
    async with load.client() as http:
        for path, body in ORDERS:
            here, there = [await http.post(f"{url}{path}", json=body) for url in (relay.url, engine.url)]
            [worker] = here.json()["workers"]
            outcome.expect(here.status_code == worker["status"] == there.status_code, "order", here.text[:300], path)


async def working(http: httpx.AsyncClient, engine: StockServer) -> None:
    """It has work."""
    while not await _running(http, engine):  # noqa: ASYNC110 - another process
        await trio.sleep(0.02)


async def idle(engine: StockServer, outcome: Outcome, key: str) -> None:
    """It has none, soon."""
    with trio.move_on_after(FREE):
        async with load.client() as http:
            while await _running(http, engine):  # noqa: ASYNC110 - another process
                await trio.sleep(0.02)
        return
    outcome.expect(False, "slots", f"the engine still works {FREE} s later", key)


async def _running(http: httpx.AsyncClient, engine: StockServer) -> int:
    loads = (await http.get(f"{engine.url}/v1/loads")).json()["loads"]
    return sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads)


PARTS: dict[str, Callable[..., Any]] = {
    "probed": probed,
    "same": same,
    "aborted": aborted,
    "left": left,
    "ordered": ordered,
}


async def direct(lab: Lab, outcome: Outcome) -> None:
    """One engine by gRPC: its answers, refusals, infos and orders are those of its HTTP server."""
    [engine] = await lab.engines("a")
    async with trio.open_nursery() as nursery:
        relay = await lab.relay(nursery, [engine], "direct", ())
        for part in PARTS.values():
            await part(lab, relay, engine, outcome)
        await fallen_back(lab, engine, outcome)
        nursery.cancel_scope.cancel()
