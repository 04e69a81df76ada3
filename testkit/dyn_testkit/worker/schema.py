"""The types in a `/generate` body, as SGLang 0.5.23 checks them.

Two judges, one after the other. FastAPI parses leniently ("3" passes for a number) and lists everything that it cannot
read; then the JSON contract is strict ("3" is no number) and names the first field that is wrong, in the body's order.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: A strict check of one value. Raises `WrongType`.
Check = Callable[[Any], None]


class WrongType(Exception):
    """The contract's refusal, in its words."""


# The contract ---------------------------------------------------------------------------------------------------------


def _describe(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{value}`"
        case str():
            return f'string "{value}"'
        case list():
            return "sequence"
        case _:
            return "map"


def _require(holds: bool, value: object, expected: str) -> None:
    if not holds:
        raise WrongType(f"invalid type: {_describe(value)}, expected {expected}")


def _integer(value: Any) -> None:
    _require(type(value) is int, value, "i64")


def _float(value: Any) -> None:
    _require(type(value) in (int, float), value, "f64")


def _boolean(value: Any) -> None:
    _require(type(value) is bool, value, "a boolean")


def _string(value: Any) -> None:
    _require(type(value) is str, value, "a string")


def _anything(value: Any) -> None:
    """The contract has no opinion."""


def _nullable(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _sequence(item: Check) -> Check:
    def check(value: Any) -> None:
        _require(isinstance(value, list), value, "a sequence")
        for one in value:
            item(one)

    return check


def _map(item: Check) -> Check:
    def check(value: Any) -> None:
        _require(isinstance(value, dict), value, "a map")
        for one in value.values():
            item(one)

    return check


def _or_list(name: str, alone: Callable[[Any], bool], item: Check) -> Check:
    """One value, or a list of them; `alone` tells the former."""
    several = _sequence(item)

    def check(value: Any) -> None:
        if isinstance(value, list):
            several(value)
        else:
            _require(alone(value), value, f"a value or an array of values for {name}")

    return check


def _token_ids(value: Any) -> None:
    """One flat list, or a list of lists: the first element decides."""
    _require(isinstance(value, list), value, "a value or an array of values for TokenIdsOrList")
    flat = not value or type(value[0]) in (int, float)
    (_sequence(_integer) if flat else _sequence(_sequence(_integer)))(value)


def _struct(name: str, fields: Mapping[str, Check]) -> Check:
    """An object without unknown keys."""
    known = ", ".join(f"`{field}`" for field in fields)

    def check(value: Any) -> None:
        _require(isinstance(value, dict), value, f"struct {name}")
        for key, item in value.items():
            if key not in fields:
                raise WrongType(f"unknown field `{key}`, expected one of {known}")
            fields[key](item)

    return check


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


_strings = _or_list("StringOrList", _is(str), _string)
_optional_strings = _or_list("OptionalStringOrList", _is(str), _nullable(_string))
_booleans = _or_list("BoolOrList", _is(bool), _boolean)
_integers = _or_list("Int64OrList", _is(int), _integer)
_watermark = _struct(
    "WatermarkRequestConfig",
    {"enabled": _nullable(_boolean), "key": _nullable(_string), "context_window": _nullable(_integer)},
)

#: Sampling keys in SGLang's order; all may be null.
SAMPLING: dict[str, Check] = {
    "max_new_tokens": _integer,
    "stop": _strings,
    "stop_token_ids": _sequence(_integer),
    "stop_regex": _strings,
    "temperature": _float,
    "top_p": _float,
    "top_k": _integer,
    "min_p": _float,
    "frequency_penalty": _float,
    "presence_penalty": _float,
    "repetition_penalty": _float,
    "min_new_tokens": _integer,
    "n": _integer,
    "json_schema": _string,
    "regex": _string,
    "ebnf": _string,
    "structural_tag": _string,
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "no_stop_trim": _boolean,
    "stream_interval": _integer,
    "logit_bias": _map(_float),
    "sampling_seed": _integer,
    "custom_params": _anything,
    "beam_width": _integer,
    "watermark": _watermark,
    "choice": _sequence(_string),
}
_sampling = _struct("SamplingParams", {name: _nullable(check) for name, check in SAMPLING.items()})


def _sampling_params(value: Any) -> None:
    for one in value if isinstance(value, list) else [value]:
        _sampling(one)


# FastAPI --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ListOf:
    """A list type of FastAPI's."""

    item: _Kind

    def __str__(self) -> str:
        return f"list[{self.item}]"


_Kind = str | _ListOf
_WORDS = {"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"}
#: Longer numbers are refused, as those beyond 64 bits are.
_WHOLE = re.compile(r"\s*[+-]?\d(_?\d){0,17}(\.0*)?\s*", re.ASCII)


def _fits(value: float) -> bool:
    return -(1 << 63) <= value < 1 << 63


def _bool_problem(value: object) -> tuple[str, str] | None:
    if value in (0, 1) or (isinstance(value, str) and value.lower() in _WORDS):
        return None
    if isinstance(value, str) or (isinstance(value, int) and _fits(value)):
        return "bool_parsing", "Input should be a valid boolean, unable to interpret input"
    return "bool_type", "Input should be a valid boolean"


def _int_problem(value: object) -> tuple[str, str] | None:
    if isinstance(value, int):
        return None
    if isinstance(value, float) and value.is_integer():
        size = "Unable to parse input string as an integer, exceeded maximum size"
        return None if _fits(value) else ("int_parsing_size", size)
    if isinstance(value, float):
        return "int_from_float", "Input should be a valid integer, got a number with a fractional part"
    if not isinstance(value, str):
        return "int_type", "Input should be a valid integer"
    if _WHOLE.fullmatch(value):
        return None
    return "int_parsing", "Input should be a valid integer, unable to parse string as an integer"


def _float_problem(value: object) -> tuple[str, str] | None:
    if isinstance(value, int | float):
        return None
    if not isinstance(value, str):
        return "float_type", "Input should be a valid number"
    try:
        float(value)
    except ValueError:
        return "float_parsing", "Input should be a valid number, unable to parse string as a number"
    return None


def _str_problem(value: object) -> tuple[str, str] | None:
    return None if isinstance(value, str) else ("string_type", "Input should be a valid string")


def _dict_problem(value: object) -> tuple[str, str] | None:
    return None if isinstance(value, dict) else ("dict_type", "Input should be a valid dictionary")


_PROBLEMS: dict[str, Callable[[object], tuple[str, str] | None]] = {
    "bool": _bool_problem,
    "int": _int_problem,
    "float": _float_problem,
    "str": _str_problem,
    "nullable[str]": lambda value: None if value is None else _str_problem(value),
    "nullable[int]": lambda value: None if value is None else _int_problem(value),
    "dict[str,any]": _dict_problem,
}


def detail(kind: str, place: tuple[Any, ...], message: str, value: object, **more: object) -> str:
    """One fault that FastAPI finds, as SGLang prints it."""
    return repr({"type": kind, "loc": place, "msg": message, "input": value} | more)


def _problems(kind: _Kind, value: object, place: tuple[Any, ...]) -> Iterator[str]:
    if isinstance(kind, str):
        found = _PROBLEMS[kind](value)
        if found is not None:
            yield detail(found[0], place, found[1], value)
    elif not isinstance(value, list):
        yield detail("list_type", place, "Input should be a valid list", value)
    else:
        for index, item in enumerate(value):
            yield from _problems(kind.item, item, (*place, index))


@dataclass(frozen=True, slots=True)
class Field:
    """A key of the body: FastAPI's type (a union if several), and the contract's (None: it ignores the key)."""

    kinds: tuple[_Kind, ...]
    contract: Check | None
    #: May be null; the contract's null is in `contract`.
    null: bool = True

    def problems(self, name: str, value: object) -> list[str]:
        """What FastAPI finds wrong with a value, one detail a fault."""
        if value is None and self.null:
            return []
        place = ("body", name)
        if len(self.kinds) == 1:
            return list(_problems(self.kinds[0], value, place))
        found = [list(_problems(kind, value, (*place, str(kind)))) for kind in self.kinds]
        return [] if not all(found) else [detail for details in found for detail in details]


def list_of(kind: _Kind, depth: int = 1) -> _Kind:
    """FastAPI's type of lists of something, or of lists of them."""
    return kind if not depth else _ListOf(list_of(kind, depth - 1))


#: Keys of the body that the mock worker reads, but `input_ids`, in SGLang's order.
FIELDS: dict[str, Field] = {
    "rid": Field(("str", list_of("str")), _nullable(_strings)),
    "text": Field((list_of("str"), "str"), _nullable(_strings)),
    "input_embeds": Field((list_of("float", 3), list_of("float", 2)), None),
    "sampling_params": Field((list_of("dict[str,any]"), "dict[str,any]"), _nullable(_sampling_params)),
    "return_logprob": Field((list_of("bool"), "bool"), _nullable(_booleans)),
    "logprob_start_len": Field((list_of("int"), "int"), _nullable(_integers)),
    "top_logprobs_num": Field((list_of("int"), "int"), _nullable(_integers)),
    "token_ids_logprob": Field((list_of("int", 2), list_of("int")), _nullable(_token_ids)),
    "return_text_in_logprobs": Field(("bool",), _nullable(_boolean), null=False),
    "stream": Field(("bool",), _nullable(_boolean), null=False),
    "return_hidden_states": Field((list_of("bool"), "bool"), _nullable(_booleans), null=False),
    "return_routed_experts": Field(("bool",), None, null=False),
    "routed_experts_start_len": Field(("int",), _integer, null=False),
    "return_indexer_topk": Field(("bool",), None, null=False),
    "lora_path": Field((list_of("nullable[str]"), "str"), _nullable(_optional_strings)),
    "bootstrap_host": Field((list_of("str"), "str"), None),
    "bootstrap_port": Field((list_of("nullable[int]"), "int"), None),
    "bootstrap_room": Field((list_of("int"), "int"), None),
    "routed_dp_rank": Field(("int",), _nullable(_integer)),
    "data_parallel_rank": Field(("int",), None),
    "disagg_prefill_dp_rank": Field(("int",), None),
    "return_prompt_token_ids": Field(("bool",), _boolean, null=False),
}

_CONTRACT = {name: field.contract for name, field in FIELDS.items()} | {"input_ids": _nullable(_token_ids)}


def _ids_problem(ids: object) -> str | None:
    """What is wrong with `input_ids`, which SGLang checks by itself."""
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list):
        return f"must be list or null; got {type(ids).__name__}"
    if isinstance(ids[0], int):
        return _row_problem(ids)
    if not isinstance(ids[0], list):
        return f"elements must be int or list; got {type(ids[0]).__name__}"
    rows = ((at, _row_problem(row)) for at, row in enumerate(ids))
    return next((f"row {at}: {problem}" for at, problem in rows if problem is not None), None)


def _row_problem(row: object) -> str | None:
    if not isinstance(row, list):
        return "must not be None" if row is None else f"must be list; got {type(row).__name__}"
    if row and not isinstance(row[0], int):
        return f"elements must be int; got {type(row[0]).__name__}"
    try:
        array("q", row)
    except (TypeError, OverflowError) as exc:
        return f"contains non-int64 element: {exc}"
    return None


def unreadable(body: Mapping[str, Any]) -> list[str]:
    """What FastAPI cannot read, one detail a fault. Raises `RecursionError` if the value is nested too deeply."""
    found = []
    problem = _ids_problem(body.get("input_ids"))
    if problem is not None:
        ids = body["input_ids"]
        error = {"ctx": {"error": ValueError(problem)}}
        found.append(detail("value_error", ("body", "input_ids"), f"Value error, {problem}", ids, **error))
    for name, field in FIELDS.items():
        if name in body:
            found += field.problems(name, body[name])
    return found


def check_contract(body: Mapping[str, Any]) -> None:
    """The strict check of a readable body. Raises `WrongType`."""
    for name, value in body.items():
        check = _CONTRACT.get(name)
        if check is not None:
            check(value)


def settle(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with the values in the form that FastAPI gives them, which the contract leaves alone."""
    settled = dict(body)
    for name in ("return_routed_experts", "return_indexer_topk"):
        if settled.get(name) is not None:
            settled[name] = boolean(settled[name])
    for name in ("bootstrap_port", "bootstrap_room", "data_parallel_rank", "disagg_prefill_dp_rank"):
        value = settled.get(name)
        if isinstance(value, list):
            settled[name] = [None if item is None else integer(item) for item in value]
        elif value is not None:
            settled[name] = integer(value)
    return settled


def boolean(value: bool | float | str) -> bool:
    """A value that FastAPI reads as true or false."""
    return str(value).lower() in ("1", "1.0", "on", "t", "true", "y", "yes")


def integer(value: float | str) -> int:
    """A value that FastAPI reads as a whole number."""
    return int(value.partition(".")[0] if isinstance(value, str) else value)
