"""The one message of a unary answer, from those of a stream.

SGLang 0.5.23 ends a call that has had no message for `--grpc-response-timeout-secs` (300), and a unary one has its
first when all is done. So unary answers are streams on their way.
"""

from __future__ import annotations

import json

import msgspec

from dyn_relay.direct.answer import ROWS, NotAnAnswer
from dyn_relay.grpc import sglang_pb2 as pb

#: Told once, by the first message.
_SENT = "response_sent_to_client_ts"
_list = msgspec.json.Decoder(list[msgspec.Raw])


class Whole:
    """Takes messages, of a cumulative stream or of deltas; `message` is all of them in one."""

    def __init__(self) -> None:
        self._last: pb.GenerateResponse | None = None
        #: Each has told everything so far: the newest is not looked into unless deltas follow.
        self._whole = True
        #: What the first message alone may tell.
        self._first: dict[str, str] = {}
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._rows: dict[str, list[str]] = {}

    def add(self, message: pb.GenerateResponse) -> None:
        """The next message. Raises `NotAnAnswer` if tokens are missing before it and for rows that are no JSON."""
        meta = message.meta_info
        if self._last is None:
            self._first = {name: text for name, text in meta.items() if name == _SENT or name.startswith("input_")}
        told = meta.get("completion_tokens", "")
        count = int(told) if told.isdecimal() else len(message.output_ids)
        whole = count == len(message.output_ids)  # so is the word of an abort among deltas
        if not (whole and self._whole):
            if self._whole and self._last is not None:
                self._join(self._last, len(self._last.output_ids))
            if whole:
                self._ids, self._texts = [], []
            self._join(message, count)
            self._whole = False
            if len(self._ids) != count:
                raise NotAnAnswer(f"{count} tokens are told, and {len(self._ids)} have come")
        self._last = message

    def _join(self, message: pb.GenerateResponse, count: int) -> None:
        self._ids.extend(message.output_ids)
        self._texts.append(message.text)
        for name in ROWS:
            if name in message.meta_info:
                self._add_rows(name, message.meta_info[name], count)

    def _add_rows(self, name: str, text: str, count: int) -> None:
        """Of deltas of ids the rows may be deltas, or all of them."""
        try:
            rows = _list.decode(text)
        except msgspec.MsgspecError:  # NaN is no JSON, and null no list
            try:
                rows = json.loads(text) or []
            except (ValueError, RecursionError) as exc:
                raise NotAnAnswer(f"{name} is no JSON") from exc
        if len(rows) == count:
            self._rows[name] = []
        if rows:
            self._rows.setdefault(name, []).append(text.strip()[1:-1])

    @property
    def message(self) -> pb.GenerateResponse | None:
        """None if there was none."""
        if self._last is None:
            return None
        made = pb.GenerateResponse()
        made.CopyFrom(self._last)
        made.meta_info.update(self._first)
        if self._whole:
            return made
        made.output_ids[:] = self._ids
        for name, parts in self._rows.items():
            made.meta_info[name] = f"[{', '.join(parts)}]"
        if made.HasField("text"):
            made.text = "".join(self._texts)
        return made
