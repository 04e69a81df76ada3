"""A recorded request: what a client sent, what it read back, and when. One JSON object a line in a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request as its client saw it.

    Events are kept whole, so a cumulative stream of n tokens with logprobs costs about 30 * n^2 bytes: 2 MB at 256.
    """

    #: Joins this record with its reference; unique in a history.
    key: str
    #: The request's JSON, as sent.
    body: dict[str, Any]
    #: HTTP status; 0 if there was no head.
    status: int = 0
    #: Response headers, names in lower case.
    headers: dict[str, str] = {}
    #: Streams: the data of each event in order, `[DONE]` left out.
    events: list[str] = []
    #: Streams: `[DONE]` was seen.
    done: bool = False
    #: Streams: lines that belong to no event, or came after `[DONE]`. SSE comments are not kept.
    stray: list[str] = []
    #: Unary: the whole body.
    text: str = ""
    #: What the HTTP client raised; "" if nothing.
    error: str = ""
    #: Seconds since the load began: sent, first event (0 if there was none) and end.
    sent: float = 0.0
    first: float = 0.0
    ended: float = 0.0

    @property
    def streaming(self) -> bool:
        """The client asked for server-sent events."""
        return self.body.get("stream") is True


def save(path: Path, records: Iterable[Record]) -> None:
    """Write a history, one record a line."""
    with path.open("wb") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def load(path: Path) -> dict[str, Record]:
    """Read a history by key. Raises `ValueError` if a line is no record or a key comes twice."""
    records: dict[str, Record] = {}
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if record.key in records:
            raise ValueError(f"{path}:{number}: {record.key!r} is there twice")
        records[record.key] = record
    return records
