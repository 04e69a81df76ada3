"""What is asked of the worker of a later attempt: one row a demand.

What a worker does not say is no obstacle, but for what an answer that has begun would be spoilt by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dyn_relay.formats.sglang.continuation import ample, detokenizes, ends_apart
from dyn_relay.formats.sglang.replay import SWITCHES
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.wire import raw
from dyn_relay.formats.traits import Traits
from dyn_relay.formats.weights import WeightPolicy


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a request has got."""

    request: Request
    #: Of the worker that attempt 0 was admitted for.
    first: Traits
    migratable: bool
    delivered: int
    #: Its answer has text, as shown, or else as `first` says; None if neither is known.
    text: bool | None
    #: Traits by which a worker says that it tells the rows which the answer owes.
    owed: tuple[str, ...]
    weights: WeightPolicy
    #: The versions of the weights that made the tokens so far.
    had: Sequence[object]

    @property
    def tokens(self) -> int:
        """Those of the next attempt's prompt."""
        return self.request.prompt_tokens + self.delivered


@dataclass(frozen=True, slots=True)
class Demand:
    """One thing that is asked of a worker. `name`: for whoever reads a failure, a format of `now` and `traits`."""

    name: str
    met: Callable[[Standing, Traits], bool]
    #: For people; "" where nothing is asked.
    words: Callable[[Standing], str]


def _text(standing: Standing, traits: Traits) -> bool:
    known = standing.migratable and None not in (standing.text, traits.text)
    return not known or standing.text == traits.text


def _text_words(standing: Standing) -> str:
    if not standing.migratable or standing.text is None:
        return ""
    return f"answers {'with' if standing.text else 'without'} text (`skip_tokenizer_init`), or does not say"


def _dialect(standing: Standing, traits: Traits) -> bool:
    told = traits.incremental is not None and detokenizes(traits)
    return not standing.delivered or not standing.text or told


def _dialect_words(standing: Standing) -> str:
    if not standing.delivered or not standing.text:
        return ""
    return "says whether it streams deltas (`incremental_streaming_output`), and that it is SGLang 0.5.23 or later"


def _same(standing: Standing, mine: object, theirs: object) -> bool:
    """Once there are tokens, a worker that says what the first did not may be another one, and the reverse."""
    return mine == theirs or (None in (mine, theirs) and not standing.delivered)


def _same_words(standing: Standing, mine: str, where: str) -> str:
    """`mine`: what the first worker is or has, "" if it does not say."""
    if mine:
        return f"{mine} ({where})" + ("" if standing.delivered else ", or does not say")
    return f"does not say {where}, as the first worker" if standing.delivered else ""


def _model(standing: Standing, traits: Traits) -> bool:
    return _same(standing, standing.first.model, traits.model)


def _model_words(standing: Standing) -> str:
    model = standing.first.model
    return _same_words(standing, "" if model is None else f"runs {model!r}", "`tokenizer_path`, `served_model_name`")


def _prompt(standing: Standing, traits: Traits) -> bool:
    return traits.max_input is None or standing.tokens <= traits.max_input


def _prompt_words(standing: Standing) -> str:
    return f"takes a prompt of {standing.tokens} tokens (`max_req_input_len`), or does not say"


def _context(standing: Standing, traits: Traits) -> bool:
    return not standing.delivered or not ends_apart(standing.request, standing.first, traits)


def _context_words(standing: Standing) -> str:
    mine, enough = standing.first.max_input, ample(standing.request)
    if mine is None or not standing.delivered:
        return ""
    limit = f"of at least {enough}" if enough <= mine else f"of {mine}, as the first worker"
    return f"has a `max_req_input_len` {limit}, or does not say: the answer ends where it would have ended"


def _defaults(standing: Standing, traits: Traits) -> bool:
    return _same(standing, standing.first.sampling_defaults, traits.sampling_defaults)


def _defaults_words(standing: Standing) -> str:
    mine = standing.first.sampling_defaults
    told = "" if mine is None else f"has the sampling defaults {bytes(raw(mine)).decode()}"
    return _same_words(standing, told, "`preferred_sampling_params`")


def _rows(name: str) -> Demand:
    def met(standing: Standing, traits: Traits) -> bool:
        return not standing.delivered or name not in standing.owed or getattr(traits, name) is True

    def words(standing: Standing) -> str:
        owed = standing.delivered and name in standing.owed
        return f"says that it tells the rows that are asked for (`enable_return_{name}`)" if owed else ""

    return Demand(name, met, words)


def _weights(standing: Standing, traits: Traits) -> bool:
    return not standing.delivered or standing.weights.fits(standing.had, traits.weight_version)


def _weights_words(standing: Standing) -> str:
    if not standing.delivered or standing.weights.text == "any":
        return ""
    return f"has weights that may follow, by `--weight-version-policy {standing.weights.text}`"


DEMANDS: tuple[Demand, ...] = (
    Demand("text", _text, _text_words),
    Demand("incremental_streaming_output", _dialect, _dialect_words),
    Demand("model", _model, _model_words),
    Demand("context", _prompt, _prompt_words),
    Demand("context", _context, _context_words),
    Demand("preferred_sampling_params", _defaults, _defaults_words),
    *map(_rows, SWITCHES),
    Demand(
        "weight_version {traits.weight_version}, by --weight-version-policy {now.weights.text}",
        _weights,
        _weights_words,
    ),
)
