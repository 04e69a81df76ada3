"""What a format knows of a worker: what its info endpoints say, and where it hands caches over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Where a worker publishes what is in its prefix cache, over ZeroMQ on TCP, one publisher a data-parallel rank."""

    #: As it says itself; "*", "0.0.0.0" and "::" mean the worker's own host.
    host: str
    #: Of rank 0; rank n has this plus n.
    port: int
    topic: str
    #: Tokens in a block.
    block_size: int
    ranks: int = 1
    #: Where batches can be asked for again, of rank 0; None: nowhere.
    replay_port: int | None = None


@dataclass(frozen=True, slots=True)
class Traits:
    """What a format has learnt about one worker from its info endpoints; None where the worker does not say."""

    version: str | None = None
    model: str | None = None
    weight_version: str | None = None
    #: Answers carry text (a tokenizer is loaded).
    text: bool | None = None
    #: Streams are incremental rather than cumulative.
    incremental: bool | None = None
    #: Server-side defaults merged under a request's own sampling parameters, as JSON values.
    sampling_defaults: dict[str, object] | None = None
    #: Longest prompt that the worker takes, in tokens.
    max_input: int | None = None
    #: What it samples depends on (seed, position) alone: a continuation elsewhere draws what this one would have drawn.
    deterministic: bool | None = None
    #: It gives rows to replay to those who ask: of its experts, of its indexer.
    routed_experts: bool | None = None
    indexer_topk: bool | None = None
    #: Its data-parallel ranks, numbered from 0; each has a cache and a queue of its own.
    dp_size: int | None = None
    #: What it does for a request: "regular", "prefill" or "decode".
    role: str | None = None
    #: A prefill worker's own port for handing caches over.
    bootstrap_port: int | None = None
    #: Differs between two processes at the same address, and stays the same as long as one lives.
    epoch: str | None = None
    #: None also if it publishes nothing.
    kv_events: KvEvents | None = None
    #: How it finds tool calls and reasoning in its answers: the names of its parsers; for people.
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


UNKNOWN = Traits()


@dataclass(frozen=True, slots=True)
class Pairing:
    """The prefill worker that an attempt at a decode worker has beside it."""

    traits: Traits
    #: Where it hands caches over, as the decode worker is to find it; a port of None is the one that it knows itself.
    host: str
    port: int | None
    #: The data-parallel rank that is to take it, None: whichever.
    rank: int | None
    #: Draws a number, 1 to 2**63 - 1, that no live attempt has.
    room: Callable[[], int]
    #: Takes this one, a client's, unless a live attempt has it: then False.
    claim: Callable[[int], bool]
