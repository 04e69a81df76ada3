"""A load of generate requests, sent as training frameworks send them, everything recorded.

The client is httpx without timeouts that reads `data:` lines, as slime and miles do, but it never retries: a campaign
wants to see what a client sees.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import trio

from dyn_chaos.history import Record

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


@dataclass(slots=True)
class Watch:
    """What the clients of a load have seen so far, and a way to wait for it."""

    #: Tokens seen by the client of each stream that has had an event.
    tokens: dict[str, int] = field(default_factory=dict)
    #: Requests whose client is done, well or not.
    ended: set[str] = field(default_factory=set)
    _waiting: list[tuple[Callable[[Watch], bool], trio.Event]] = field(default_factory=list)

    async def until(self, condition: Callable[[Watch], bool]) -> None:
        """Return once `condition` holds; it is asked again after every event of every stream."""
        if not condition(self):
            event = trio.Event()
            self._waiting.append((condition, event))
            await event.wait()

    def saw(self, key: str, tokens: int) -> None:
        """A stream had an event."""
        self.tokens[key] = tokens
        self._wake()

    def finish(self, key: str) -> None:
        """A request ended."""
        self.ended.add(key)
        self._wake()

    def _wake(self) -> None:
        for waiter in [waiter for waiter in self._waiting if waiter[0](self)]:
            self._waiting.remove(waiter)
            waiter[1].set()


def started(streams: int, tokens: int = 1) -> Callable[[Watch], bool]:
    """The condition that `streams` streams have at least `tokens` tokens."""
    return lambda watch: sum(seen >= tokens for seen in watch.tokens.values()) >= streams


def client() -> httpx.AsyncClient:
    """A client that neither gives up nor looks at proxy settings of the environment."""
    return httpx.AsyncClient(
        timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
    )


async def send(http: httpx.AsyncClient, url: str, plan: Plan, watch: Watch, begin: float | None = None) -> Record:
    """Send one request to `url`/generate and read its answer to the end. Errors of HTTP are recorded, not raised."""
    begin = trio.current_time() if begin is None else begin
    parts: dict[str, Any] = {"key": plan.key, "body": plan.body, "sent": trio.current_time() - begin}
    stream = _StreamReader(plan.key, watch)
    try:
        async with http.stream("POST", f"{url}/generate", json=plan.body) as response:
            parts |= {"status": response.status_code, "headers": dict(response.headers)}
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                async for line in response.aiter_lines():
                    stream.line(line)
                    if len(stream.events) == 1 and "first" not in parts:
                        parts["first"] = trio.current_time() - begin
            else:
                parts["text"] = (await response.aread()).decode("utf-8", "replace")
    except httpx.HTTPError as error:
        parts["error"] = f"{type(error).__name__}: {error}"
    watch.finish(plan.key)
    return Record(
        **parts, ended=trio.current_time() - begin, events=stream.events, done=stream.done, stray=stream.stray
    )


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


class _StreamReader:
    """Lines in, events out."""

    def __init__(self, key: str, watch: Watch) -> None:
        self.events: list[str] = []
        self.stray: list[str] = []
        self.done = False
        self._key = key
        self._watch = watch

    def line(self, line: str) -> None:
        if not line or line.startswith(":"):
            return
        if not line.startswith("data: ") or self.done:
            self.stray.append(line)
        elif line == "data: [DONE]":
            self.done = True
        else:
            self.events.append(line[6:])
            self._watch.saw(self._key, _tokens(line[6:]))


class _Meta(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


_decoder = msgspec.json.Decoder(_Event)


def _tokens(text: str) -> int:
    """Tokens delivered as an event says; 0 if it does not."""
    try:
        return _decoder.decode(text).meta_info.completion_tokens
    except msgspec.DecodeError:
        return 0


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
