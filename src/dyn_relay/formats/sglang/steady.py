"""Events that only bring more tokens: almost all of a long answer's, so they are looked at as little as can be."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from dyn_relay.formats.base import End
from dyn_relay.formats.sglang.account import UNREADABLE, Account
from dyn_relay.formats.sglang.events import Delta, delta_decoder
from dyn_relay.formats.sglang.growing import Growing
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.rules import Rules
from dyn_relay.formats.sglang.wire import Foreign


class Steady(Account):
    """An account that counts such events quickly. What `_account` makes of them is the same."""

    __slots__ = ("_even", "_steady")

    def __init__(self, request: Request, rid: str, rules: Rules) -> None:
        super().__init__(request, rid, rules)
        #: Of the current attempt's events nothing is needed but ids and text: a stream's client gets them as they are.
        self._even = False
        #: Reads events of an attempt whose every trait is known: only their counts are still to be checked.
        self._steady: msgspec.json.Decoder[Delta] | Growing | None = None

    def passes(self, data: bytes) -> bool:
        """Count an event that only brings more tokens; False, and nothing is done, if it may be anything else."""
        steady, attempt = self._steady, self._attempt
        if steady is None:
            return False
        try:
            event = steady.decode(data)
            meta, ids = event.meta_info, event.output_ids
            if (
                meta is None
                or meta.finish_reason is not None
                or meta.id != attempt.rid
                or meta.weight_version != attempt.version
                or meta.weight_versions is not UNSET
            ):
                return False
            total = meta.completion_tokens
            if total is UNSET or ids is UNSET:
                return False
            fresh = total - attempt.tokens
            if fresh < 1 or len(ids) != fresh:
                return False
            if attempt.deltas:
                self._ledger.ids.extend(ids)
                if self._ledger.text:
                    attempt.say(event.text)
        except (msgspec.DecodeError, RecursionError, OverflowError, Foreign):
            return False
        attempt.events += 1
        attempt.last_delta = fresh
        attempt.tokens = self.attempt_tokens = total
        self.delivered = attempt.base + total
        attempt.newest = data
        return True

    def _account(self, data: bytes, now: float, whole: bytes) -> int | None:
        """As any account's; then it is known how to read the next event."""
        self._steady = None
        before = super()._account(data, now, whole)
        if before is not None and self._even and not self._finished:
            self._steady = self._reads_next(data)
        return before

    def _stop(self, end: End, detail: str, *, accuses: bool = False) -> None:
        super()._stop(end, detail, accuses=accuses)
        self._steady = None

    def _reads_next(self, data: bytes) -> msgspec.json.Decoder[Delta] | Growing | None:
        attempt = self._attempt
        if attempt.dialect is None or (attempt.prefilled is not None and attempt.prefilled.adds):
            return None
        if attempt.deltas:
            return delta_decoder if self.streaming else None  # rows of a unary answer are gathered
        try:
            return Growing(data)
        except UNREADABLE:
            return None  # a shape that only `_account` reads
