"""What of an exchange is about the other worker of a pair: the one that computes the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from dyn_relay.formats.base import Answer, End, Event, Outbound
from dyn_relay.formats.sglang.account import UNREADABLE
from dyn_relay.formats.sglang.events import DONE, Fault, Kind, error_object, fault, kind, whole_decoder
from dyn_relay.formats.sglang.prefilled import Prefilled
from dyn_relay.formats.sglang.reader import Reader
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.rules import Rules
from dyn_relay.formats.sglang.spans import label
from dyn_relay.formats.sglang.wire import plain, read, read_fields
from dyn_relay.formats.traits import Pairing, Traits

#: Characters of an engine's words that a log line shows.
_LINE = 200


class Paired(Reader):
    """See `dyn_relay.formats.base.Exchange`."""

    __slots__ = ("_computed", "_whole", "beside")

    def __init__(self, request: Request, rid: str, rules: Rules) -> None:
        super().__init__(request, rid, rules)
        self.beside: Outbound | None = None
        #: A worker's answer that was no stream.
        self._whole: Answer | None = None
        #: Versions of the weights that have computed prompts for earlier attempts, in other workers.
        self._computed: set[object] = set()

    def _beside(self, pairing: Pairing, rid: str) -> Prefilled:
        """The prefill worker's part in the current attempt, which it knows by this name, if it was told one."""
        prefilled = Prefilled(self._request, rid, self._ledger.replays, self._rules.codec, begun=self.delivered > 0)
        prefilled.version = pairing.traits.weight_version
        return prefilled

    @property
    def waits_for_prefill(self) -> bool:
        """Something of the decode worker's answer needs what the prefill worker says."""
        prefilled = self._attempt.prefilled
        return prefilled is not None and prefilled.waits and self.end is None

    def prefilled(self, answer: Answer, events: Sequence[Event] | None, now: float) -> bytes:
        """The prefill worker's whole answer; return what the client's body gets. Raises `CannotComplete`."""
        prefilled = self._attempt.prefilled
        assert prefilled is not None
        if answer.status >= 400:
            self._refused(answer)
            return b""
        try:
            found, held = prefilled.told(_bodies(answer, events))
        except UNREADABLE as exc:
            self._stop(End.GARBAGE, f"the prefill worker's answer: {exc}")
            return b""
        if found is not None:
            self._stop_with(found)
            self._held = self._renamed(*_last_event(events)) if events is not None else b""
        return b"" if self.end is not None else self._joined(held, now)

    def refers(self, answer: Answer, events: Sequence[Event] | None) -> bool:
        """Is the prefill worker's answer an error of which the decode worker may say more?"""
        if answer.status >= 400:
            return Fault(answer.status, _message(answer.body)).accuses
        try:
            said = (read(whole_decoder, body) for body in _bodies(answer, events) if body[:1] == b"{")
            return any(kind(event) is Kind.ERROR and fault(event).accuses for event in said)
        except UNREADABLE:
            return False

    def mismatch(self, decode: Traits, prefill: Traits) -> str:
        """Why the two can be no pair: the first token, and the cache, are the prefill worker's."""
        versions = [decode.weight_version] if decode.weight_version is not None else []
        fits = self._rules.weights.fits(versions, prefill.weight_version)
        return "" if fits else f"weight_version {prefill.weight_version} beside {decode.weight_version}"

    def _refused(self, answer: Answer) -> None:
        self._whole = answer
        message = _message(answer.body)
        found = Fault(answer.status, message)
        self._stop(found.end(0), message[:_LINE], accuses=found.accuses)
        if answer.status == 503 and (self.streaming or self.verdict.migratable):
            self.end = End.BUSY  # a stream has its status before its first token, whatever the words

    def _prompt_version(self) -> set[object]:
        """Of the weights that have computed the current attempt's prompt, if another worker has."""
        prefilled = self._attempt.prefilled
        return set() if prefilled is None or not self.attempt_tokens else {label(prefilled.version)}


def _bodies(answer: Answer, events: Sequence[Event] | None) -> list[bytes]:
    return [data for _, data in events if data] if events is not None else [answer.body]


def _last_event(events: Sequence[Event]) -> Event:
    """The last one that says something."""
    return next((event for event in reversed(events) if event[1] not in (b"", DONE)), (b"", b"{}"))


def _message(data: bytes) -> str:
    """What an engine's error body says, whatever its shape."""
    try:
        fields = read_fields(data)
        found = error_object(fields["error"]).message if "error" in fields else str(plain(fields["message"]))
    except (ValueError, KeyError):
        found = data[:_LINE].decode("utf-8", "replace")
    return found
