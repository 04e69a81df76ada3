"""What a worker is able to do: discovered from its own words, or given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import trio

from dyn_testkit.contract.table import Broken
from dyn_testkit.worker.options import Dialect

if TYPE_CHECKING:
    from dyn_testkit.contract.subject import Subject

_PACED = 48


@dataclass(frozen=True, slots=True)
class Facts:
    """Capabilities; None is "unknown", and checks that need to know are skipped."""

    dialect: Dialect | None = None
    #: It has a tokenizer: answers carry text.
    tokenizer: bool | None = None
    #: It returns routed experts to those who ask.
    experts: bool | None = None
    context_length: int | None = None
    #: The longest prompt that the scheduler takes.
    input_limit: int | None = None
    #: `/abort_request` of a live rid takes with it all that begin with it.
    abort_by_prefix: bool = True
    #: Seconds a token.
    pace: float = 0.0
    #: `/server_info`, as far as it can be read.
    server: Mapping[str, Any] | None = None
    #: `preferred_sampling_params`, which are merged under the request's own.
    defaults: Mapping[str, Any] | None = None

    def says(self, flag: str, default: Any = None) -> Any:
        """A server argument."""
        return (self.server or {}).get(flag, default)


async def discover(subject: Subject, given: Facts) -> Facts:
    """Fill in what was not given. What cannot be found out stays unknown: its own check will say so."""
    server = await _object(subject, "/server_info")
    info = await _object(subject, "/model_info")
    models = await _object(subject, "/v1/models")
    found = replace(given, server=server, defaults=info.get("preferred_sampling_params"))
    if found.tokenizer is None and isinstance(server.get("skip_tokenizer_init"), bool):
        found = replace(found, tokenizer=not server["skip_tokenizer_init"])
    elif found.tokenizer is None:
        found = replace(found, tokenizer=await _has_text(subject))
    if found.experts is None and isinstance(server.get("enable_return_routed_experts"), bool):
        found = replace(found, experts=server["enable_return_routed_experts"])
    if found.context_length is None:
        found = replace(found, context_length=_context(models))
    if found.input_limit is None and isinstance(server.get("max_req_input_len"), int):
        found = replace(found, input_limit=server["max_req_input_len"])
    if found.dialect is None:
        found = replace(found, dialect=await _dialect(subject))
    return replace(found, pace=await _pace(subject))


async def _object(subject: Subject, path: str) -> dict[str, Any]:
    try:
        value = (await subject.ask(path)).response.json()
    except (Broken, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _context(models: Mapping[str, Any]) -> int | None:
    try:
        length = models["data"][0]["max_model_len"]
    except (LookupError, TypeError):
        return None
    return length if isinstance(length, int) else None


async def _has_text(subject: Subject) -> bool | None:
    try:
        return "text" in await subject.unary(subject.body(1))
    except (Broken, TypeError):
        return None


async def _dialect(subject: Subject) -> Dialect | None:
    try:
        return dialect_of(await subject.events(subject.body(12, return_logprob=True)))
    except (Broken, LookupError, TypeError, AttributeError):
        return None


def dialect_of(events: Sequence[Mapping[str, Any]]) -> Dialect | None:
    """How a stream with logprobs is spelled; None if no spelling fits, or all do."""
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    if len(set(counts)) < 2:
        return None
    fresh = [count - before for count, before in zip(counts, [0, *counts], strict=False)]
    ids = [len(event["output_ids"]) for event in events]
    rows = [len(event["meta_info"]["output_token_logprobs"]) for event in events]
    spelled: dict[Dialect, tuple[list[int], list[int]]] = {
        "cumulative": (counts, counts),
        "incremental": (fresh, fresh),
        "mixed": (fresh, counts),
    }
    return next((dialect for dialect, wanted in spelled.items() if wanted == (ids, rows)), None)


async def _pace(subject: Subject) -> float:
    try:
        took = []
        for count in (1, 1, _PACED, _PACED):  # the first one may still warm something up
            began = trio.current_time()
            await subject.unary(subject.body(count))
            took.append(trio.current_time() - began)
    except Broken:
        return 0.0
    return max(0.0, (min(took[2:]) - took[1]) / (_PACED - 1))
