"""What workers are asked for is what the client asked for, but for what a router must change to rescue it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dyn_testkit.checkers.base import Finding, asked, sampling_of
from dyn_testkit.history import History

#: Names, the prompt and the budgets have checkers of their own; a unary request is asked for as a stream, in larger
#: pieces.
_OTHERS = frozenset({"rid", "stream", "input_ids", "logprob_start_len"})
#: What ties the legs of a pair together.
_PLACES = frozenset({"bootstrap_host", "bootstrap_port", "bootstrap_room"})
_BUDGETS = frozenset({"max_new_tokens", "min_new_tokens", "stream_interval"})


def check(history: History) -> Iterator[Finding]:
    """Needs workers that told what they were asked."""
    for key, record in history.records.items():
        wanted = _own(record.body)
        for arrival in asked(record, history.arrivals):
            got = _own(arrival.body)
            want = wanted
            if arrival.worker in history.run.grpc:
                want, got = _asking(wanted), _asking(got)
            wrong = sorted(name for name in want.keys() | got.keys() if want.get(name, _NO) != got.get(name, _NO))
            if wrong:
                values = {name: (got.get(name, _NO), want.get(name, _NO)) for name in wrong}
                yield Finding(key, "requests", f"{arrival.worker} was asked, and the client asks: {values}")


_NO = "nothing"
#: What asks for nothing: gRPC leaves it out, or says it in full.
_NEUTRAL = {
    "return_logprob": False,
    "top_logprobs_num": 0,
    "return_routed_experts": False,
    "return_indexer_topk": False,
}


def _asking(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that ask for something."""
    return {name: value for name, value in fields.items() if value not in (None, []) and value != _NEUTRAL.get(name)}


def _own(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are the client's alone, those of `sampling_params` among them."""
    others = _OTHERS | _PLACES | {"sampling_params"}
    top = {name: value for name, value in body.items() if name not in others}
    return top | {f"sampling_params.{name}": value for name, value in sampling_of(body).items() if name not in _BUDGETS}
