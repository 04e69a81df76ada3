"""What a request needs of its worker, and cannot do without. Source: SGLang 0.5.23.

Without a tokenizer a worker refuses what is spelled in text; of a prompt that is too long for it, another one may say
something else; and rows that it is not set up to tell are left out without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dyn_relay.formats.sglang.continuation import holds
from dyn_relay.formats.sglang.replay import SWITCHES
from dyn_relay.formats.sglang.request import ABSENT, Request
from dyn_relay.formats.traits import Traits


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a worker must have said to have, if the request asks for it. Its name is for people."""

    name: str
    asked: Callable[[Request], bool]
    met: Callable[[Request, Traits], bool]


#: Sampling parameters that only a worker with a tokenizer takes, and their values that ask for nothing.
_SPELLED = ("stop", "stop_regex", "min_new_tokens", "json_schema", "regex", "ebnf", "structural_tag")
_NOTHING: tuple[object, ...] = (ABSENT, None, "", [], 0)


def _spelled(request: Request) -> bool:
    if "text" in request.fields and request.value("text") is not None and request.value("input_ids") in (ABSENT, None):
        return True
    named = [name for name in _SPELLED if name in request.sampling]
    return bool(named) and any(request.parameter(name) not in _NOTHING for name in named)


def _rows(name: str, switch: str) -> Need:
    return Need(name, lambda request: request.asks(switch), lambda _, traits: getattr(traits, name) is True)


NEEDS: tuple[Need, ...] = (
    Need("tokenizer", _spelled, lambda _, traits: traits.text is True),
    Need("context", lambda request: request.prompt is not None, lambda request, traits: holds(request, traits)),
    *(_rows(name, switch) for name, switch in SWITCHES.items()),
)


def needs_of(request: Request) -> tuple[Need, ...]:
    """Those of a request."""
    return tuple([need for need in NEEDS if need.asked(request)])
