"""A model of an inference engine: every value is a pure function of (history, sampling, output so far).

The history is folded token by token into 64 bits; whatever the engine "computes" at a position comes from these bits.
So one wrong, missing or repeated token in a prefix changes everything that comes after it, and two processes on two
machines agree on every bit. What is stateful in a real engine is so here too: penalties and grammars look at the
output *of this request*, hence a request that is continued as "prompt + output" under them visibly diverges.

Facts about finishing and limits are those of SGLang 0.5.23.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from dyn_testkit.stops import StopStrings
from dyn_testkit.tokenizer import PLAIN, Tokenizer

_MASK = (1 << 64) - 1
_FLOAT = struct.Struct("<f")
_DOUBLE = struct.Struct("<d")

#: The bits of an empty history.
EMPTY = 0x243F6A8885A308D3

#: `max_new_tokens` when the request does not name it.
DEFAULT_MAX_NEW_TOKENS = 128
#: What an explicit `null` asks for, before the context limit is applied.
UNLIMITED = 1 << 30
#: Below this temperature SGLang samples greedily.
GREEDY_TEMPERATURE = 1e-6
#: The seed that every request without one shares under deterministic inference.
UNSEEDED = 42


def mix(state: int, value: int) -> int:
    """Fold an integer into 64 bits of state; order matters."""
    bits = ((state ^ (value & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def mix_text(state: int, text: str) -> int:
    """Fold a string into the state, its length included."""
    data = text.encode("utf-8", "surrogatepass")
    state = mix(state, len(data))
    for start in range(0, len(data), 8):
        state = mix(state, int.from_bytes(data[start : start + 8], "little"))
    return state


def mix_float(state: int, value: float) -> int:
    """Fold a number into the state; 1 and 1.0 are the same."""
    return mix(state, int.from_bytes(_DOUBLE.pack(float(value)), "little"))


def absorb(history: int, tokens: Sequence[int]) -> int:
    """The history after some more tokens."""
    for token in tokens:
        history = mix(history, token)
    return history


@dataclass(frozen=True, slots=True)
class Model:
    """The model that an engine has loaded. Two workers with equal models give equal answers."""

    vocab_size: int = 1024
    #: The first of these is the one that is generated.
    eos_token_ids: tuple[int, ...] = (2,)
    #: Probability that the next token is EOS, at every position.
    eos_rate: float = 0.0
    context_length: int = 131072
    #: Layers with experts, experts a layer, experts chosen for a token; an expert row is layers x chosen.
    layers: int = 2
    experts: int = 8
    experts_per_token: int = 2
    #: The token at each position of prompt and output, whatever was before; after them, the model is on its own.
    recites: tuple[int, ...] = ()

    @property
    def max_input(self) -> int:
        """Longer prompts are refused by the scheduler (seen: 2042 with a context of 2048)."""
        return self.context_length - 6


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters that the engine model knows; names, defaults and meaning are SGLang's."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    json_schema: str = ""
    regex: str = ""
    ebnf: str = ""
    structural_tag: str = ""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: tuple[tuple[str, float], ...] = ()
    sampling_seed: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Sampling:
        """From a request's `sampling_params`, merged over the server's preferred ones. Types are taken on trust."""
        merged = {**(defaults or {}), **given}
        known = {field.name: merged[field.name] for field in fields(cls) if field.name in merged}
        values = {name: value for name, value in known.items() if value is not None or name == "max_new_tokens"}
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        for name in ("stop", "stop_token_ids"):
            if name in values:
                values[name] = tuple(values[name])
        if "logit_bias" in values:
            values["logit_bias"] = tuple(sorted(values["logit_bias"].items()))
        values["n"] = max(1, values.get("n", 1))
        return cls(**values)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def grammar(self) -> str:
        """The grammar that constrains the output, in any of its four spellings."""
        return self.json_schema or self.regex or self.ebnf or self.structural_tag

    @property
    def stateful(self) -> bool:
        """True if the next token depends on where this request's own output began."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1.0)
        return any(penalties) or bool(self.grammar)


class Outlook(NamedTuple):
    """The law of the next token: token `t` has rank `(a * t + b) mod vocab_size`; rank 0 is the most likely."""

    bits: int
    a: int
    b: int
    #: EOS is due here (it has rank 0 then).
    eos_due: bool


def outlook(model: Model, history: int, shape: int = 0) -> Outlook:
    """What the engine computes after a history; `shape` is whatever else bends the logits."""
    bits = mix(history, shape)
    size = model.vocab_size
    a = mix(bits, 1) % size or 1
    while math.gcd(a, size) != 1:
        a = a % size + 1
    eos_due = bool(model.eos_token_ids) and mix(bits, 2) < model.eos_rate * 2.0**64
    b = -a * model.eos_token_ids[0] % size if eos_due else mix(bits, 3) % size
    return Outlook(bits, a, b, eos_due)


def token_at(model: Model, view: Outlook, rank: int) -> int:
    """The token of this rank."""
    size = model.vocab_size
    return (rank - view.b) * pow(view.a, -1, size) % size if size > 1 else 0


def logprob(model: Model, view: Outlook, token: int) -> float:
    """Log-probability of a token: 32-bit, widened to a double, as the wire spells it. Falls strictly with the rank."""
    rank = (view.a * token + view.b) % model.vocab_size
    jitter = (mix(view.bits, rank + 16) >> 44) / 2.0**20
    return widened(-(rank + 0.8 * jitter) * 0.25 - 0.001)


def widened(value: float) -> float:
    """The 32-bit float nearest to a number, as a double."""
    narrow: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    return narrow


def top(model: Model, view: Outlook, count: int) -> list[tuple[float, int]]:
    """The `count` most likely tokens with their log-probabilities, best first."""
    tokens = [token_at(model, view, rank) for rank in range(min(count, model.vocab_size))]
    return [(logprob(model, view, token), token) for token in tokens]


def sampling_shape(sampling: Sampling, adapter: str = "") -> int:
    """What bends the logits of a request, whatever its output: adapter and logit bias. 0 for none."""
    shape = mix_text(5, adapter) if adapter else 0
    for name, bias in sampling.logit_bias:
        shape = mix_float(mix_text(shape, name), bias)
    return shape


def _stateful_shape(sampling: Sampling) -> int:
    shape = mix_text(7, sampling.grammar)
    for value in (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty):
        shape = mix_float(shape, value)
    return shape


def sampling_noise(sampling: Sampling) -> int:
    """What steers the choice among likely tokens: seed, temperature and the cut-offs."""
    noise = mix(11, UNSEEDED if sampling.sampling_seed is None else sampling.sampling_seed)
    for value in (sampling.temperature, sampling.top_p, sampling.min_p):
        noise = mix_float(noise, value)
    return mix(noise, sampling.top_k)


def choose(model: Model, view: Outlook, noise: int | None, position: int, masked: frozenset[int]) -> int:
    """The next token: rank 0 if `noise` is None (greedy), else a rank drawn from (noise, position, history)."""
    rank = 0
    if noise is not None and not view.eos_due:
        draw = mix(mix(noise, position), view.bits)
        rank = min((draw & -draw).bit_length() - 1, model.vocab_size - 1) if draw else 0
    hidden = masked if view.eos_due else masked | frozenset(model.eos_token_ids)
    for offset in range(model.vocab_size):
        token = token_at(model, view, (rank + offset) % model.vocab_size)
        if token not in hidden:
            return token
    return token_at(model, view, rank)


def expert_row(model: Model, history: int) -> list[int]:
    """Experts chosen for the last token of a history: `layers * experts_per_token` numbers below `experts`."""
    width = model.layers * model.experts_per_token
    return [mix(mix(history, 13), column) % model.experts for column in range(width)]


def indexer_row(model: Model, history: int) -> list[int]:
    """Positions that an indexer chooses for the last token of a history: as many numbers as `expert_row` has."""
    width = model.layers * model.experts_per_token
    return [mix(mix(history, 17), column) % model.context_length for column in range(width)]


def budget(model: Model, prompt_tokens: int, max_new_tokens: int | None) -> int:
    """Tokens that a request may generate once the context limit is applied (SGLang's `max_req_len - L - 1`)."""
    wanted = UNLIMITED if max_new_tokens is None else max_new_tokens
    return max(0, min(wanted, model.context_length - 2 - prompt_tokens))


class Step(NamedTuple):
    """One generated token."""

    token: int
    #: What the engine saw when it chose the token: for `logprob` and `top`.
    view: Outlook
    #: The history with the token in it.
    history: int
    #: SGLang's `finish_reason` if this token is the last one.
    finish: dict[str, Any] | None


def generate(
    model: Model,
    prompt: Sequence[int],
    sampling: Sampling,
    adapter: str = "",
    tokenizer: Tokenizer = PLAIN,
    tokens_per_tick: int = 1,
) -> Iterator[Step]:
    """Generate until a stop or the budget. With a budget of 0 nothing is yielded (the finish is `length` 0).

    The tokenizer is that of the stop strings. Stops are looked for after each forward pass.
    """
    limit = budget(model, len(prompt), sampling.max_new_tokens)
    tokens = frozenset(model.eos_token_ids) | frozenset(sampling.stop_token_ids)
    strings = StopStrings(sampling.stop, tokenizer)
    steps = _steps(model, prompt, sampling, adapter, tokens)
    output: list[int] = []
    while len(output) < limit:
        made = list(itertools.islice(steps, min(tokens_per_tick, limit - len(output))))
        output += [step.token for step in made]
        stop: tuple[str | int, int] | None = strings.found(output, len(made))
        if stop is None and not sampling.ignore_eos:
            stop = _stop_token(output, len(made), tokens)
        finish: dict[str, Any] | None = {"type": "length", "length": limit} if len(output) == limit else None
        if stop is not None:
            matched, end = stop
            finish = {"type": "stop", "matched": matched}
            made = made[: end - len(output) or None]
        if finish is not None:
            yield from made[:-1]
            yield made[-1]._replace(finish=finish)
            return
        yield from made


def _steps(
    model: Model, prompt: Sequence[int], sampling: Sampling, adapter: str, stops: frozenset[int]
) -> Iterator[Step]:
    """Generate without end; `stops` do not come before their time."""
    history = absorb(EMPTY, prompt)
    noise = None if sampling.greedy else sampling_noise(sampling)
    shape = sampling_shape(sampling, adapter)
    own = _stateful_shape(sampling)
    for count in itertools.count(1):
        view = outlook(model, history, mix(shape, own) if sampling.stateful else shape)
        masked = stops if count <= sampling.min_new_tokens else frozenset()
        position = len(prompt) + count - 1
        recited = model.recites[position] if position < len(model.recites) else None
        token = choose(model, view, noise, position, masked) if recited is None else recited
        history = mix(history, token)
        own = mix(own, token)
        yield Step(token, view, history, None)


def _stop_token(output: Sequence[int], new: int, stops: frozenset[int]) -> tuple[int, int] | None:
    """The first stop token among the new ones, and how many tokens there are with it."""
    ends = range(len(output) - new + 1, len(output) + 1)
    return next(((output[end - 1], end) for end in ends if output[end - 1] in stops), None)
