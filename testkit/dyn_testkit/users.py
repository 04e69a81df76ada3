"""Generation requests as published rollout frameworks send them, field by field, in token mode.

What each sends was read in its sources; the spelling (nulls, zeros, fields that are always there) is theirs, because
that is what a router must bear. Values come from a seeded generator, so a load can be made again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted of a request, whoever sends it."""

    prompt: list[int]
    #: `max_new_tokens`.
    tokens: int
    rid: str
    #: Ask for a stream, if this user ever does.
    stream: bool = False
    #: Ask for expert rows, if this user ever does.
    experts: bool = False
    vocabulary: int = 1024


def slime(wish: Wish, random: Random) -> Body:
    """slime's rollout, unary or streaming: nulls, no rid."""
    body: Body = {
        "input_ids": wish.prompt,
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": wish.tokens,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
    }
    if random.random() < 0.5:
        body["sampling_params"]["sampling_seed"] = random.randrange(1 << 31)
    if wish.experts:
        body["return_routed_experts"] = True
    if wish.stream:
        body["stream"] = True
    return body


def slime_agent(wish: Wish, random: Random) -> Body:
    """slime's agent adapter: a rid of its own, always a stream of this session's next turn."""
    return {**slime(wish, random), "rid": wish.rid}


def miles(wish: Wish, random: Random) -> Body:
    """miles: switches that are always present, top logprobs for distillation."""
    body = slime(wish, random)
    body |= {"return_routed_experts": wish.experts, "return_indexer_topk": False, "rid": wish.rid}
    if random.random() < 0.5:
        body["top_logprobs_num"] = random.randint(1, 3)
    return body


def areal(wish: Wish, random: Random) -> Body:
    """AReaL: unary, a frequency penalty of zero, stop tokens."""
    stops = [random.randrange(wish.vocabulary)] if random.random() < 0.3 else []
    return {
        "input_ids": wish.prompt,
        "image_data": None,
        "sampling_params": {
            "top_p": 1.0,
            "top_k": 100_000_000,
            "max_new_tokens": wish.tokens,
            "temperature": 1.0,
            "stop_token_ids": stops,
            "ignore_eos": False,
            "skip_special_tokens": False,
            "frequency_penalty": 0.0,
        },
        "return_logprob": True,
        "stream": False,
    }


def areal_score(wish: Wish, random: Random) -> Body:
    """AReaL's scoring request: one token, the logprobs of the prompt."""
    return {
        "input_ids": wish.prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 0,
        "stream": False,
    }


def nemo_rl(wish: Wish, random: Random) -> Body:
    """NeMo-RL: unary, few fields."""
    return {
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "max_new_tokens": wish.tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
        "input_ids": wish.prompt,
    }


def greedy(wish: Wish, random: Random) -> Body:
    """Nobody's in particular: greedy, with everything that token mode can report."""
    return {
        "rid": wish.rid,
        "input_ids": wish.prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": wish.tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": random.randrange(len(wish.prompt)),
        "top_logprobs_num": 2,
        "token_ids_logprob": [3, wish.vocabulary - 1],
        "return_prompt_token_ids": True,
        "stream": wish.stream,
    }


def stopping(wish: Wish, random: Random) -> Body:
    """Nobody's in particular: many tokens that may end it, and some that must come first."""
    body = slime_agent(wish, random)
    stops = random.sample(range(wish.vocabulary), 8)
    body["sampling_params"] |= {"stop_token_ids": stops, "min_new_tokens": random.randint(0, wish.tokens)}
    return body


def penalized(wish: Wish, random: Random) -> Body:
    """Nobody's in particular, with what no router can continue: a penalty counts the tokens of one request."""
    body = slime_agent(wish, random)
    body["sampling_params"]["frequency_penalty"] = 0.5
    return body


def mistaken(wish: Wish, random: Random) -> Body:
    """A client's mistake, which every engine refuses with a 400 (SGLang 0.5.23: `top_p` must be in (0, 1])."""
    body = areal(wish, random)
    body["sampling_params"]["top_p"] = 2.0
    return body


#: How texts are made of tokens, which is nothing to tokens; gRPC has no such fields.
_SPELLING = ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens")


def over_grpc(body: Body) -> Body:
    """The same request without the fields that gRPC cannot carry, and with numbers of 32 bits, which it does not round.

    So it asks the same of every engine, whatever way it comes.
    """
    kept = {name: value for name, value in body["sampling_params"].items() if name not in _SPELLING}
    kept |= {name: struct.unpack("<f", struct.pack("<f", value))[0] for name, value in kept.items() if _real(value)}
    return body | {"sampling_params": kept}


def _real(value: object) -> bool:
    return isinstance(value, float)


USERS: Mapping[str, Callable[[Wish, Random], Body]] = {
    user.__name__: user
    for user in (slime, slime_agent, miles, areal, areal_score, nemo_rl, greedy, stopping, penalized, mistaken)
}
