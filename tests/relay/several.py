"""Requests for several answers, and what each answer must be: that of a request of its own."""

from __future__ import annotations

import json
from typing import Any

from dyn_testkit.client import Response
from dyn_testkit.oracle import Oracle, differences, fold

#: Prompts that share nothing, and two that begin alike.
PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 11], [300], [12, 13, 14, 15], [16, 17]]
TOKENS = 5


def several(prompts: int = 3, n: int = 1, *, stream: bool = True, tokens: int = TOKENS, **extra: Any) -> dict[str, Any]:
    """A request for `prompts * n` answers, all migratable as requests of their own."""
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream_interval": 1}
    params |= {"n": n} if n > 1 else {}
    body = {"input_ids": PROMPTS[:prompts], "sampling_params": params, "return_logprob": True, "stream": stream}
    return {**body, **extra}


def alone(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The request of each answer, in stock's order; with a rid where stock says which."""
    made = []
    for at, prompt in enumerate(body["input_ids"]):
        params = dict(body["sampling_params"])
        for _ in range(params.pop("n", 1)):
            one = {**body, "input_ids": prompt, "sampling_params": params}
            rid = one.pop("rid", None)
            if rid and body["sampling_params"].get("n", 1) == 1:
                one["rid"] = f"{rid}_{at}" if isinstance(rid, str) else rid[at]
            made.append(one)
    return made


def judged(response: Response, body: dict[str, Any], oracle: Oracle, dialect: str = "cumulative") -> list[str]:
    """Where an answer to `several` is not the oracle's. Empty: it is exact, and framed as stock frames it."""
    wanted = [oracle.answer(one) for one in alone(body)]
    if response.status != 200 or not response.complete:
        return [f"status {response.status}, {response.broken or 'complete'}: {response.body[:300]!r}"]
    if not body["stream"]:
        answers = response.json()
    else:
        events = response.events()
        if events[-1] != b"[DONE]" or events.count(b"[DONE]") != 1:
            return [f"terminators: {events.count(b'[DONE]')}, the last event: {events[-1]!r}"]
        values = [json.loads(event) for event in events[:-1]]
        if any("error" in value or list(value)[-1] != "index" for value in values):
            return [f"an event without index: {values!r}"]
        by_index = [[value for value in values if value["index"] == index] for index in range(len(wanted))]
        if sum(map(len, by_index)) != len(values) or not all(by_index):
            return ["an index without events, or events without an index"]
        answers = [fold(each, dialect) for each in by_index]
    rids = [answer["meta_info"]["id"] for answer in answers]
    found = [f"rids: {rids}"] if len(set(rids)) != len(rids) else []
    if len(answers) != len(wanted):
        return [f"{len(answers)} answers, want {len(wanted)}"]
    for index, (answer, want) in enumerate(zip(answers, wanted, strict=True)):
        found += [f"{index}: {line}" for line in differences(answer, want)]
    return found
