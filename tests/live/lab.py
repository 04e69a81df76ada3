"""The laboratory: stock engines that start when a case needs them, and what they answer when nobody disturbs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import trio

from dyn_chaos import audit, engines, load
from dyn_chaos.engines import Server, Stock, StockServer
from dyn_chaos.load import Plan
from dyn_chaos.processes import free_port
from dyn_testkit import history
from dyn_testkit.history import Record
from dyn_testkit.users import Wish, miles, slime, slime_agent

W = TypeVar("W")

NATIVE = ("--attention-backend", "torch_native")


@dataclass(frozen=True)
class Flavour:
    """A way to start stock engines, and what its requests ask for in addition."""

    flags: tuple[str, ...] = NATIVE
    env: Mapping[str, str] = field(default_factory=dict)
    model: str = "qwen3-fp32"
    body: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: With a tokenizer, and the requests of frameworks that read the text.
    text: bool = False
    #: The proxy reaches the engines by gRPC.
    grpc: bool = False


#: The first two are the dialects of SGLang 0.5.23; the others stream cumulatively.
FLAVOURS = {
    "cumulative": Flavour(),
    "incremental": Flavour((*NATIVE, "--incremental-streaming-output")),
    "experts": Flavour(
        (*NATIVE, "--enable-return-routed-experts"), model="qwen3moe-fp32", body={"return_routed_experts": True}
    ),
    # Without the deterministic flag an engine ignores the seed. Its attention backends are told apart because the one
    # that the flag asks for does not run on a CPU.
    "seeded": Flavour(
        (
            "--enable-deterministic-inference",
            *("--attention-backend", "triton"),
            *("--prefill-attention-backend", "torch_native", "--decode-attention-backend", "torch_native"),
        ),
        env={"SHIM_SKIP_BATCH_INVARIANT": "1"},
        sampling={"temperature": 1.0, "sampling_seed": 77},
    ),
    "text": Flavour(text=True),
    "text-incremental": Flavour((*NATIVE, "--incremental-streaming-output"), text=True),
    "grpc": Flavour(grpc=True),
    "grpc-incremental": Flavour((*NATIVE, "--incremental-streaming-output"), grpc=True),
    "grpc-text": Flavour(text=True, grpc=True),
    "grpc-text-incremental": Flavour((*NATIVE, "--incremental-streaming-output"), text=True, grpc=True),
}

#: Texts of prompts, in turn. What the random model goes on with are letters, and bytes that are hardly ever characters.
PROMPTS = (
    "Hello the world",
    "caf\u00e9 \U0001f469\u200d\U0001f468 ok",
    "\ud55c\uad6d\uc5b4",
    "\u4e2d\u6587 a",
    "a b c",
)


@dataclass(frozen=True)
class Place:
    """Where the proxy finds a worker."""

    url: str


async def busiest(relay: str, reached: Mapping[str, W]) -> W:
    """Of workers by their addresses, the one with the most requests, as the proxy counts them."""
    return reached[(await audit.busiest(relay, [Place(url) for url in reached])).url]


@dataclass
class Lab:
    """Engines of one flavour, named by letters, and reference answers from the first of them."""

    stock: Stock
    logs: Path
    flavour: str
    nursery: trio.Nursery
    _engines: dict[str, StockServer] = field(default_factory=dict)
    _references: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def of(cls, home: Path, flavour: str, nursery: trio.Nursery) -> Lab:
        """With what `run.sh` has put into `home`."""
        how = FLAVOURS[flavour]
        shim = Path(__file__).parent / "shim"
        stock = Stock(
            home / "venv/bin/python", shim, home / "models" / how.model, how.flags, how.env, how.text, how.grpc
        )
        return cls(stock, home / "logs", flavour, nursery)

    async def engines(self, letters: str) -> list[StockServer]:
        """One idle engine with an empty cache for each letter; those not named are stopped. They start one by one."""
        for letter in sorted(self._engines.keys() - set(letters)):
            await self.discard(letter)
        for letter in letters:
            if letter not in self._engines:
                self._engines[letter] = await self.stock.start(self.nursery, free_port(), self.logs)
        running = [self._engines[letter] for letter in letters]
        for engine in running:
            await flush(engine.url)
        return running

    async def discard(self, letter: str) -> None:
        """Stop an engine for good; the next case that names its letter gets a new one."""
        await self._engines.pop(letter).stop()

    def plans(self, streams: int, tokens: int) -> list[Plan]:
        """The flavour's load."""
        flavour = FLAVOURS[self.flavour]
        if flavour.text and not flavour.grpc:  # whose messages have nothing for how the text is made
            return _framework_plans(streams, tokens)
        made = []
        for plan in load.plans(streams, tokens):
            sampling = {**plan.body["sampling_params"], **flavour.sampling}
            body = {**plan.body, **flavour.body, "sampling_params": sampling}
            if flavour.grpc:
                body.pop("token_ids_logprob", None)  # its messages have no such field
            made.append(Plan(plan.key, body))
        return made

    async def references(self, plans: Sequence[Plan]) -> dict[str, Record]:
        """What engine A says to each plan, asked directly, once a flavour. Leaves its cache empty."""
        missing = [plan for plan in plans if plan.key not in self._references]
        if missing:
            engine = self._engines["a"]
            self._references |= await load.ask_references(engine.url, missing, at_once=4)
            await flush(engine.url)
            asked = history.of_records({}, self._references)
            history.save(self.logs / f"references-{self.flavour}.jsonl", asked.entries())
        return {plan.key: self._references[plan.key] for plan in plans}

    async def relay(self, nursery: trio.Nursery, workers: Sequence[Server], case: str, flags: Sequence[str]) -> Server:
        """The proxy before `workers`, its log and trace named after the case."""
        urls = [self.address(worker) for worker in workers]
        return await engines.relay(nursery, urls, self.logs, flags, f"relay-{case}-{self.flavour}")

    def address(self, worker: Server) -> str:
        """How the proxy reaches it, and lists it."""
        return worker.grpc if isinstance(worker, StockServer) and worker.grpc else worker.url

    async def busiest(self, relay: Server, workers: Sequence[StockServer]) -> StockServer:
        """The one with the most requests, as the proxy counts them."""
        return await busiest(relay.url, {self.address(worker): worker for worker in workers})

    def trace(self, case: str) -> Path:
        """The trace that the case's proxy wrote."""
        return self.logs / f"relay-{case}-{self.flavour}.jsonl"


def _framework_plans(streams: int, tokens: int) -> list[Plan]:
    """What slime and miles send, greedily: by ids and by text, unary and streaming, special tokens skipped or not."""
    random = Random(7)
    made = []
    for number in range(streams):
        user = (slime, slime_agent, miles)[number % 3]
        key = f"{number:04d}-{user.__name__}"
        ids = [random.randrange(4, 1024) for _ in range(random.randint(1, 24))]
        body = user(Wish(ids, tokens, key, stream=number % 2 == 0), random)
        body["sampling_params"] |= {"temperature": 0.0, "skip_special_tokens": number % 5 == 0}
        if number % 4 in (1, 2):
            del body["input_ids"]
            body["text"] = PROMPTS[number % len(PROMPTS)]
        made.append(Plan(key, body))
    return made


async def flush(url: str) -> None:
    """Empty an engine's prefix cache. The engine itself waits until it has no work, for half a minute at most."""
    async with load.client() as http:
        (await http.post(f"{url}/flush_cache", params={"timeout": 30})).raise_for_status()
