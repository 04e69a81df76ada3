"""The exchange of everything that no format claims: forwarded as it is, never continued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dyn_relay.formats.base import Answer, End, Event, Headers, Outbound, Reading, Verdict
from dyn_relay.formats.traits import Pairing, Traits


class OpaqueExchange:
    """A request on a path that is bridged. Implements `formats.base.Exchange`; its verdict is always a refusal."""

    streaming = False
    generations = 1
    prompt_tokens = 0
    delivered = 0
    attempt_tokens = 0
    cached_tokens: int | None = None
    detail = ""
    accuses = False

    #: Nobody can name it, so nobody can abort it but by leaving.
    rid = ""
    pinned: int | None = None
    session = ""
    cache_space = b""
    named = False
    answering = False
    leavable = False
    question: Outbound | None = None
    beside: Outbound | None = None
    waits_for_prefill = False

    def __init__(self, method: str, target: str, content_type: bytes, body: bytes) -> None:
        self.end: End | None = None
        self.verdict = Verdict("path")
        self._outbound = Outbound(method, target, body, content_type)

    def admit(self, traits: Traits) -> Verdict:
        return self.verdict

    def know(self, traits: Traits) -> None:
        """Nothing of it matters."""

    def fingerprint(self) -> bytes:
        return b""

    def prefix(self) -> Sequence[int] | str | None:
        return None

    def lacks(self, traits: Traits) -> str:
        return ""

    def unfit(self, traits: Traits) -> str:
        return ""

    def dispatch(
        self, traits: Traits, rid: str, now: float, rank: int | None = None, pairing: Pairing | None = None
    ) -> Outbound:
        return self._outbound

    def prefilled(self, answer: Answer, events: Sequence[Event] | None, now: float) -> bytes:
        raise NotImplementedError  # nothing is sent beside it

    def refers(self, answer: Answer, events: Sequence[Event] | None) -> bool:
        return False

    def mismatch(self, decode: Traits, prefill: Traits) -> str:
        return ""

    def stall_allowance(self) -> float:
        return 0.0

    def head(self, status: int, headers: Headers) -> Reading:
        return Reading.OPAQUE

    def feed(self, events: Sequence[Event], now: float) -> bytes:
        raise AssertionError("an opaque answer is never split into events")

    def passes(self, data: bytes) -> bool:
        raise AssertionError("an opaque answer is never split into events")

    def body(self, data: bytes, now: float) -> None:
        raise AssertionError("an opaque answer is never collected")

    def reply(self, status: int, body: bytes, now: float) -> bytes:
        raise AssertionError("nothing is asked about an opaque answer")

    def last_words(self) -> bytes:
        return b""

    def complete(self, now: float) -> bytes | None:
        return None

    def abort(self, now: float) -> bytes | None:
        return None

    def answer(self, now: float) -> Answer:
        raise AssertionError("an opaque answer is forwarded as it comes")

    def failure(self, status: int, reason: str, message: str, started: bool) -> Answer:
        error = {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
        return Answer.of(status, {**error, "reason": reason, "delivered": 0, "started": started})

    def failure_event(self, status: int, reason: str, message: str) -> bytes:
        return b""

    def crossed_versions(self) -> bool:
        return False

    def resampled(self) -> bool:
        return False

    def recomputed(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        return {}
