"""What is refused, with which status and in which of SGLang's shapes of error."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dyn_testkit.contract.checks.budgets import filled
from dyn_testkit.contract.subject import Exchange, Subject
from dyn_testkit.contract.table import Check, Inapplicable, add, equal, expect


class Shape(enum.Enum):
    """How an error is told."""

    CONTRACT = 'unary and stream: 400 `{"error":"..."}`'
    UNREADABLE = 'unary and stream: 400 `{"object":"error",...,"type":"Bad Request","param":null,"code":400}`'
    VALUE = 'unary: 400 `{"error":{"message"}}`; stream: 200 and one error event'
    SCHEDULER = 'unary: 400 `{"error":{"message"}}`; stream: 200 and one event with an `abort` finish of status 400'


@dataclass(frozen=True, slots=True)
class Row:
    """One way to be refused."""

    name: str
    shape: Shape
    #: Part of the message.
    says: str
    #: What is asked, besides the usual.
    asks: Callable[[Subject], Mapping[str, Any]] | None = None
    sampling: Mapping[str, Any] | None = None
    #: Sent as it is, instead.
    raw: bytes | None = None
    headers: Mapping[str, str] | None = None
    source: str = "§1.5"


def _too_long(worker: Subject, more: int) -> list[int]:
    length = worker.facts.context_length
    if length is None or length > worker.longest_prompt or worker.facts.says("allow_auto_truncate"):
        raise Inapplicable(f"context length {length}, prompts of {worker.longest_prompt} at most, or truncation")
    return filled(worker, length + more)


def _over_context(worker: Subject) -> dict[str, Any]:
    return {"input_ids": _too_long(worker, 0)}


def _over_input_limit(worker: Subject) -> dict[str, Any]:
    length, limit = worker.facts.context_length, worker.facts.input_limit
    if limit is None or length is None or limit >= length - 1:
        raise Inapplicable("max_req_input_len is unknown, or the context is the limit")
    return {"input_ids": _too_long(worker, limit + 1 - length), "sampling_params": {"max_new_tokens": 1}}


def _budget_over_context(worker: Subject) -> dict[str, Any]:
    length = worker.facts.context_length
    if length is None or worker.facts.says("allow_auto_truncate"):
        raise Inapplicable(f"context length {length}, or truncation")
    return {"sampling_params": {"max_new_tokens": length - len(worker.prompt) + 1}}


def _token_mode(worker: Subject) -> dict[str, Any]:
    if worker.facts.tokenizer is not False:
        raise Inapplicable("the worker has a tokenizer (or give tokenizer=False)")
    return {"sampling_params": {"stop": ["a"], "max_new_tokens": 2}}


def _fixed(**more: Any) -> Callable[[Subject], Mapping[str, Any]]:
    return lambda worker: more


_SP, _API = "§1.5, sampling_params.py:246", "§1.4, api_types.py:1259"
ROWS = (
    Row("unknown_sampling_key", Shape.CONTRACT, "unknown field `wibble`", sampling={"wibble": 1}, source=_API),
    Row("string_for_a_number", Shape.CONTRACT, "invalid type", sampling={"max_new_tokens": "4"}, source=_API),
    Row("float_for_an_integer", Shape.CONTRACT, "invalid type", sampling={"max_new_tokens": 4.0}, source=_API),
    Row("boolean_for_an_integer", Shape.CONTRACT, "invalid type", sampling={"max_new_tokens": True}, source=_API),
    Row("number_for_a_boolean", Shape.CONTRACT, "invalid type", sampling={"ignore_eos": 1}, source=_API),
    Row("malformed_json", Shape.UNREADABLE, "json_invalid", raw=b'{"input_ids": [1,2', source="§1.4"),
    Row("nan_in_json", Shape.UNREADABLE, "json_invalid", raw=b'{"input_ids":[5],"priority":NaN}', source="§1"),
    Row("empty_body", Shape.UNREADABLE, "Field required", raw=b"", source="§1.4"),
    Row("body_is_an_array", Shape.UNREADABLE, "GenerateReqInput", raw=b"[1,2]", source="§1.4"),
    Row("body_is_null", Shape.UNREADABLE, "GenerateReqInput", raw=b"null", source="§1.4"),
    Row("not_json_by_type", Shape.UNREADABLE, "", headers={"content-type": "text/plain"}, source="§10.21"),
    Row("strings_for_tokens", Shape.UNREADABLE, "input_ids", _fixed(input_ids=["5"]), source="§1.4"),
    Row("null_for_a_flag", Shape.UNREADABLE, "", _fixed(return_prompt_token_ids=None), source="§1.4"),
    Row("no_prompt", Shape.VALUE, "should be provided", _fixed(input_ids=...), source="§1.5, io_struct.py:444"),
    Row("empty_prompt", Shape.VALUE, "cannot be empty", _fixed(input_ids=[]), source="§1.5, io_struct.py:490"),
    Row("negative_temperature", Shape.VALUE, "temperature", sampling={"temperature": -1}, source=_SP),
    Row("top_p_above_one", Shape.VALUE, "top_p", sampling={"top_p": 2}, source=_SP),
    Row("negative_top_k", Shape.VALUE, "top_k", sampling={"temperature": 1, "top_k": -5}, source=_SP),
    Row("negative_budget", Shape.VALUE, "max_new_tokens", sampling={"max_new_tokens": -1}, source=_SP),
    Row("penalty_out_of_range", Shape.VALUE, "presence_penalty", sampling={"presence_penalty": 3}, source=_SP),
    Row("dp_rank_out_of_range", Shape.VALUE, "routed_dp_rank", _fixed(routed_dp_rank=1 << 20)),
    Row("same_rid_twice", Shape.VALUE, "Duplicate", _fixed(input_ids=[[5], [6]], rid=["x", "x"])),
    Row("too_few_rids", Shape.VALUE, "length mismatch", _fixed(input_ids=[[5], [6]], rid=["x"]), source="§2"),
    Row("stop_string_in_token_mode", Shape.VALUE, "tokenizer", _token_mode, source="recorded"),
    Row("prompt_over_context", Shape.VALUE, "context length", _over_context),
    Row("budget_over_context", Shape.VALUE, "maximum context length", _budget_over_context),
    Row("prompt_over_input_limit", Shape.SCHEDULER, "maximum allowed length", _over_input_limit),
    Row(
        "logprob_start_beyond",
        Shape.SCHEDULER,
        "logprob_start_len",
        lambda worker: {"return_logprob": True, "logprob_start_len": len(worker.prompt) + 9},
    ),
)


async def _sends(worker: Subject, row: Row, stream: bool) -> Exchange:
    if row.raw is not None:
        return await worker.ask("/generate", row.raw, method="POST", headers=row.headers)
    more = dict(row.asks(worker)) if row.asks is not None else {}
    return await worker.ask(
        "/generate", worker.body(2, sampling=row.sampling, **more, stream=stream), headers=row.headers
    )


def _message(exchange: Exchange, row: Row, stream: bool) -> str:
    """The error's message, if it has the right shape. Raises `Broken`."""
    response = exchange.response
    event_of = row.shape in (Shape.VALUE, Shape.SCHEDULER) and stream
    equal("status", response.status, 200 if event_of else 400)
    if not event_of:
        equal("content type", response.header("content-type"), "application/json")
        value = response.json()
        if row.shape is Shape.UNREADABLE:
            fixed = {name: item for name, item in value.items() if name != "message"}
            equal("the error", fixed, {"object": "error", "type": "Bad Request", "param": None, "code": 400})
            return str(value["message"])
        expect(set(value) == {"error"}, f"keys are {sorted(value)}, the contract says `error` alone")
        if row.shape is Shape.CONTRACT:
            expect(isinstance(value["error"], str), "`error` is no string")
            return str(value["error"])
        expect(set(value["error"]) == {"message"}, "`error` is no object with `message` alone")
        return str(value["error"]["message"])
    values = response.values()
    equal("events before [DONE]", len(values), 1)
    if row.shape is Shape.SCHEDULER:
        finish = values[0]["meta_info"]["finish_reason"]
        equal("the finish", (finish["type"], finish["status_code"]), ("abort", 400))
        return str(finish["message"])
    error = values[0]["error"]
    fixed = {name: item for name, item in error.items() if name != "message"}
    equal("the error event", fixed, {"type": "invalid_request_error", "code": 400, "retryable": False})
    return str(error["message"])


def _check(row: Row) -> Check:
    async def run(worker: Subject) -> None:
        for stream in (False,) if row.raw is not None else (False, True):
            message = _message(await _sends(worker, row, stream), row, stream)
            expect(row.says in message, f"the message is {message!r}; it should tell of {row.says!r}")

    spelled = row.name.replace("_", " ")
    return Check(f"refuses_{row.name}", f"Refused, {spelled}: {row.shape.value}", row.source, run)


for _row in ROWS:
    add(_check(_row))
