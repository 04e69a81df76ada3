"""How long one attempt may be silent.

Until it begins to answer a healthy worker may take as long as it likes (its queue may be long), unless
--first-token-timeout-secs says otherwise; one whose health is bad gets one more stall timeout, for stock SGLang says
503 while it is busy with a long prefill, too. After that, bad health ends the attempt, and good health is worth one
more stall timeout: stock SGLang can say 200 long after its scheduler died. A refused (not migratable) request is only
ever given up when its worker does not answer the question at all: nobody could do better.
"""

from __future__ import annotations

import math

from dyn_relay.config import Config
from dyn_relay.fleet.health import Probe
from dyn_relay.formats.base import Exchange
from dyn_relay.relay.failure import Kind
from dyn_relay.relay.reader import AnswerReader


class Silence:
    """The patience that is left with one attempt. Times in seconds of the loop's clock."""

    def __init__(self, config: Config, exchange: Exchange, sent_at: float, *, alone: bool = True) -> None:
        """`alone`: no prefill worker is waited for, before which the first token is not due (see `begin`)."""
        self._config = config
        self._exchange = exchange
        self._sent_at = self._checked_at = sent_at
        self._begun_at = sent_at if alone else math.inf
        #: What was last heard when the worker was granted another timeout.
        self._granted_for = -1.0

    def deadline(self, reader: AnswerReader) -> float:
        """When to wake up and look."""
        stall = self._config.stall_timeout_secs
        deadline = math.inf
        if stall:
            deadline = max(self._heard(reader), self._checked_at) + stall + self._exchange.stall_allowance()
        return min(deadline, self._first_token_deadline(reader))

    def too_late(self, reader: AnswerReader, now: float) -> bool:
        """True once --first-token-timeout-secs is over."""
        return now >= self._first_token_deadline(reader)

    def over(self, reader: AnswerReader, now: float) -> bool:
        """True if the worker is to be asked for its health."""
        return now >= self.deadline(reader)

    def renew(self, now: float) -> None:
        """Begin again to count: it is not the worker that is slow."""
        self._checked_at = now

    def excuse(self, now: float) -> None:
        """As `renew`, for the first token as well: the worker is paused."""
        self._checked_at = now
        if self._begun_at < math.inf:
            self._begun_at = now

    def begin(self, now: float) -> None:
        """As `renew`: the prefill worker has done its part, from now on the first token is due."""
        self._checked_at = self._begun_at = now

    def judge(self, reader: AnswerReader, asked_at: float, probe: Probe, now: float) -> Kind | None:
        """The worker was asked for its health; is the silence a stall? A token that came meanwhile is an answer."""
        self.renew(now)
        heard = self._heard(reader)
        if heard > asked_at:
            return None
        if not probe.answered:
            return Kind.STALL
        if not self._exchange.verdict.migratable:
            return None
        if reader.begun and not probe.ok:
            return Kind.STALL
        if probe.ok and not reader.begun:
            return None
        if self._granted_for == heard:
            return Kind.STALL
        self._granted_for = heard
        return None

    def words(self, kind: Kind) -> str:
        """For the failure's detail."""
        if kind is Kind.FIRST_TOKEN:
            return f"no token within {self._config.first_token_timeout_secs:g} s"
        return f"no token for {self._config.stall_timeout_secs:g} s"

    def _first_token_deadline(self, reader: AnswerReader) -> float:
        limit = self._config.first_token_timeout_secs
        visible = self._exchange.streaming or self._exchange.verdict.migratable
        if not limit or reader.first_token is not None or not visible:
            return math.inf
        return self._begun_at + limit

    def _heard(self, reader: AnswerReader) -> float:
        heard = reader.last_token if self._exchange.verdict.migratable else reader.last_event
        return heard if heard is not None else self._sent_at
