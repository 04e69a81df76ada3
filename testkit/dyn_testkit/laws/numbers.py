"""Arithmetic that answers depend on, done a second time, in the plainest way: the properties compare with it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from dyn_testkit.engine import DEFAULT_MAX_NEW_TOKENS


def left_of(sampling: Mapping[str, Any], delivered: int) -> dict[str, int]:
    """The budgets that a continuation may name after `delivered` tokens; `min_new_tokens` only if the client did.

    Counted down one token at a time: neither goes below 0, and the least never exceeds the most.
    """
    most = sampling.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    least = sampling.get("min_new_tokens", 0)
    for _ in range(delivered):
        if most == 0 and least == 0:
            break
        most -= most > 0
        least -= least > 0
    while least > most:
        least -= 1
    return {"max_new_tokens": most} | ({"min_new_tokens": least} if "min_new_tokens" in sampling else {})


def split_rows(encoded: str, width: int, at: int) -> tuple[str, str]:
    """Cut a Base64 text of rows (`width` bytes each) before row `at`: two texts, each padded on its own.

    Raises `ValueError` if the bytes are no whole rows, or there are fewer than `at`.
    """
    data = base64.b64decode(encoded, validate=True)
    if len(data) % width:
        raise ValueError(f"{len(data)} bytes are no whole rows of {width}")
    if not 0 <= at <= len(data) // width:
        raise ValueError(f"no row {at} among {len(data) // width}")
    return base64.b64encode(data[: at * width]).decode(), base64.b64encode(data[at * width :]).decode()


def join_rows(parts: list[str], width: int) -> str:
    """The Base64 text of all rows of some texts. Raises `ValueError` if one holds no whole rows."""
    whole = b""
    for part in parts:
        data = base64.b64decode(part, validate=True)
        if len(data) % width:
            raise ValueError(f"{len(data)} bytes are no whole rows of {width}")
        whole += data
    return base64.b64encode(whole).decode()


def rows_survive(
    rows: list[bytes],
    at: int,
    split: Callable[[str, int, int], tuple[str, str]] = split_rows,
    join: Callable[[list[str], int], str] = join_rows,
) -> None:
    """A law for whoever cuts and joins Base64 rows: split and join give the text back; each half has its own rows.

    `rows` are of one width. Base64 texts must not be joined as texts: a row rarely ends where a group of four does.
    """
    width = len(rows[0]) if rows else 1
    whole = base64.b64encode(b"".join(rows)).decode()
    head, tail = split(whole, width, at)
    for name, part, wanted in (("head", head, rows[:at]), ("tail", tail, rows[at:])):
        found = base64.b64decode(part, validate=True)
        assert found == b"".join(wanted), f"the {name} of {rows!r} cut at {at} is {found!r}"
    joined = join([head, tail], width)
    assert joined == whole, f"{rows!r} cut at {at} and joined is {joined!r}, not {whole!r}"
