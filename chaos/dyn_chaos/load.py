"""A load of generate requests, sent as training frameworks send them, everything recorded.

The client is httpx without timeouts that reads `data:` lines, as slime and miles do, but it never retries: a campaign
wants to see what a client sees.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import trio

from dyn_testkit.history import Record
from dyn_testkit.watch import EventReader, Watch

#: What the requests of a load ask for beside tokens; they take turns.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"return_logprob": True},
    {"return_logprob": True, "logprob_start_len": 0},
    {"return_logprob": True, "top_logprobs_num": 2},
    {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3, 700]},
    {"return_logprob": True, "rid": ""},
    {},
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One request to send."""

    key: str
    body: dict[str, Any]


def plans(streams: int, tokens: int, *, seed: int = 0, prompt: int = 24, vocabulary: int = 1024) -> list[Plan]:
    """`streams` requests of `tokens` tokens at temperature 0, half of them unary, each with its own prompt.

    Streams and unary requests come in random order, so that no policy that takes turns sends them to different workers.
    Each mode has every variant, in turn. Prompts have 1 to `prompt` ids in [3, vocabulary). A variant with `rid` gets
    one of its own.
    """
    chosen = random.Random(seed)
    numbers = list(range(streams))
    chosen.shuffle(numbers)
    made = []
    for place, number in enumerate(numbers):
        streaming = number % 2 == 0
        key = f"{place:04d}-{'sse' if streaming else 'unary'}"
        variant = dict(VARIANTS[number // 2 % len(VARIANTS)])
        if "rid" in variant:
            variant["rid"] = f"chaos-{seed}-{key}"
        body = {
            "input_ids": [chosen.randrange(3, vocabulary) for _ in range(chosen.randint(1, prompt))],
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            **variant,
            "stream": streaming,
        }
        made.append(Plan(key, body))
    return made


def renamed(plan: Plan, prefix: str) -> Plan:
    """The same request under another key and, if it has a rid, another rid.

    A stock engine aborts a rid two seconds after its stream has ended, whoever uses it then (SGLang 0.5.23), so no rid
    is sent twice.
    """
    body = {**plan.body, "rid": f"{prefix}-{plan.body['rid']}"} if "rid" in plan.body else plan.body
    return Plan(f"{prefix}-{plan.key}", body)


def client() -> httpx.AsyncClient:
    """A client that neither gives up nor looks at proxy settings of the environment."""
    return httpx.AsyncClient(
        timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
    )


async def send(http: httpx.AsyncClient, url: str, plan: Plan, watch: Watch, begin: float | None = None) -> Record:
    """Send one request to `url`/generate and read its answer to the end. Errors of HTTP are recorded, not raised."""
    begin = trio.current_time() if begin is None else begin
    parts: dict[str, Any] = {"key": plan.key, "body": plan.body, "sent": trio.current_time() - begin}
    stream = EventReader(plan.key, watch)
    try:
        async with http.stream("POST", f"{url}/generate", json=plan.body) as response:
            parts |= {"status": response.status_code, "headers": dict(response.headers)}
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                async for line in response.aiter_lines():
                    stream.line(line, trio.current_time() - begin)
            else:
                parts["text"] = (await response.aread()).decode("utf-8", "replace")
    except httpx.HTTPError as error:
        parts["error"] = f"{type(error).__name__}: {error}"
    watch.finish(plan.key)
    return Record(**parts, **stream.read(), ended=trio.current_time() - begin)


async def ask_references(url: str, plans: Sequence[Plan], *, at_once: int | None = None) -> dict[str, Record]:
    """What an undisturbed engine says to each plan, by the plan's key; asked under other rids than the plans'."""
    records = await send_all(url, [renamed(plan, "reference") for plan in plans], at_once=at_once)
    return {plan.key: msgspec.structs.replace(records[f"reference-{plan.key}"], key=plan.key) for plan in plans}


async def send_all(
    url: str, wanted: Sequence[Plan], watch: Watch | None = None, *, at_once: int | None = None
) -> dict[str, Record]:
    """Send all plans at the same time, or `at_once` of them; the records by key, in the order of the plans."""
    watch = watch or Watch()
    begin = trio.current_time()
    records: dict[str, Record] = {}
    gate = trio.Semaphore(at_once or max(1, len(wanted)))

    async def one(http: httpx.AsyncClient, plan: Plan) -> None:
        async with gate:
            records[plan.key] = await send(http, url, plan, watch, begin)

    async with client() as http, trio.open_nursery() as nursery:
        for plan in wanted:
            nursery.start_soon(one, http, plan)
    return {plan.key: records[plan.key] for plan in wanted}


async def metrics(http: httpx.AsyncClient, url: str) -> Mapping[str, float]:
    """A process's Prometheus samples, `name` and `name{label="value",...}`, from `url`/metrics."""
    text = (await http.get(f"{url}/metrics")).raise_for_status().text
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def total(samples: Mapping[str, float], name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(value for sample, value in samples.items() if sample == name or sample.startswith(name + "{"))
