"""Bugs that the simulator must find: each is a few characters of the proxy, replaced. First ten classical ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before`, which `file` of `dyn_relay` must hold once, becomes `after`."""

    name: str
    file: str
    before: str
    after: str
    #: The built-in scenario that it is hunted with; "" is the default.
    scenario: str = ""


MUTANTS = (
    Mutant(
        "off-by-one budget",
        "formats/sglang/continuation.py",
        'sampling["max_new_tokens"] = raw(most)',
        'sampling["max_new_tokens"] = raw(most + 1)',
    ),
    Mutant(
        "replayed token",
        "formats/sglang/continuation.py",
        "inside(raw(ids.tolist()))",
        "inside(raw(ids.tolist()[:-1] or ids.tolist()))",
    ),
    Mutant(
        "dropped last token",
        "formats/sglang/exchange.py",
        "self._request.max_new_tokens is not None and tokens >= self._request.max_new_tokens:",
        "self._request.max_new_tokens is not None and tokens >= self._request.max_new_tokens - 1:",
    ),
    Mutant(
        "wrong exclusion",
        "relay/budget.py",
        "excluded=self.excluded | avoided if failure.rule.avoids else self.excluded,",
        "excluded=self.excluded,",
    ),
    Mutant(
        "leaked lease",
        "fleet/target.py",
        ") -> None:\n        self.release()\n",
        ") -> None:\n        if kind is None:\n            self.release()\n",
    ),
    Mutant(
        "duplicate attempt",
        "relay/attempt.py",
        "        self.sent = True\n",
        "        self.sent = True\n"
        "        from functools import partial\n"
        "        from dyn_relay.relay.orders import tell\n"
        "        if self._exchange.delivered:\n"
        "            self._context.chores.start(partial(tell, self._context, self.worker, outbound))\n",
    ),
    Mutant(
        "clean end after a cut",
        "relay/downstream.py",
        "await self.send(self.wrap(event))",
        'await self.send(self.finish(b"data: [DONE]\\n\\n"))',
    ),
    Mutant(
        "stale prompt logprobs",
        "formats/sglang/account.py",
        '            return\n        ledger.text = "text" in top',
        '            pass\n        ledger.text = "text" in top',
    ),
    Mutant(
        "swapped dialect",
        "formats/sglang/account.py",
        "dialect = self._dialect or self._attempt.dialect or",
        "dialect = self._attempt.dialect or self._dialect or",
    ),
    Mutant(
        "retry on 400",
        "relay/failure.py",
        "(Kind.REFUSED, Phase.ANSWERED): Rule(Action.RELAY),",
        "(Kind.REFUSED, Phase.ANSWERED): Rule(Action.REROUTE),",
    ),
    Mutant(
        "a clock that begins anew",
        "formats/sglang/rebase.py",
        "            return raw(elapsed)\n",
        "            return value\n",
    ),
    Mutant(
        "stop tokens lost",
        "formats/sglang/continuation.py",
        '    sampling["max_new_tokens"] = raw(most)\n',
        '    sampling["max_new_tokens"] = raw(most)\n    sampling["stop_token_ids"] = raw(None)\n',
    ),
    Mutant(
        "unary answer of the last attempt alone",
        "formats/sglang/ledger.py",
        "        if other.count:\n            if self.count:",
        "        if other.count and not self.count:\n            if self.count:",
    ),
    Mutant(
        "abort lost after a migration",
        "relay/request.py",
        "            if self._current.sent:\n",
        "            if self._current.sent and len(self.record.attempts) == 1:\n",
    ),
    Mutant(
        "a lost attempt's worker is not told",
        "relay/farewell.py",
        "    if attempt is None or not attempt.sent or not attempt.rid or",
        "    if True or",
    ),
    Mutant(
        "a failed worker is no suspect",
        "relay/request.py",
        "            if failure.rule.penalty and not self.abort_wished:\n",
        "            if False:\n",
    ),
    Mutant(
        "no silence is a stall",
        "relay/silence.py",
        "        self.renew(now)\n        heard",
        "        self.renew(now)\n        return None\n        heard",
    ),
    Mutant(
        "a drained worker is well",
        "fleet/health.py",
        "200 <= answer.status < 300",
        "200 <= answer.status < 600",
    ),
    Mutant(
        "migrations without end",
        "relay/budget.py",
        "spent=counts and self.migrations == 0",
        "spent=False",
    ),
    Mutant(
        "convicted at the first death",
        "fleet/poison.py",
        "entry.suspicion > self._attempts",
        "entry.suspicion >= self._attempts",
    ),
)

#: Of sidecars, and of the leases that they take.
SIDECARS = tuple(
    Mutant(*row, scenario="sidecars")
    for row in (
        ("a lease never lapses", "fleet/discovery/leased.py", "self._clock() + seconds", "self._clock() + 1e9"),
        (
            "a lease lasts a quarter",
            "fleet/discovery/leased.py",
            "self._clock() + seconds",
            "self._clock() + seconds / 4",
        ),
        (
            "a lapsed lease leaves its worker in the fleet",
            "fleet/discovery/leased.py",
            "self._remember(origin)\n        self._report(self.named)",
            "self._remember(origin)",
        ),
        (
            "who has lost a lease gets no other one",
            "fleet/discovery/leased.py",
            "if origin not in self._ends:",
            "if origin not in self._ends and origin not in self._ended:",
        ),
        (
            "an engine's death withdraws nothing",
            "sidecar/sidecar.py",
            "one.tell(Away(self.url))\n        closing.set()",
            "pass\n        closing.set()",
        ),
        (
            "an engine's death is not looked for",
            "sidecar/sidecar.py",
            "why = await self.engine.gone()",
            "await trio.sleep_forever(); why = ''",
        ),
        (
            "an engine that hangs is dead",
            "sidecar/engine.py",
            "_ABSENT = (State.STARTING, State.DEAD)",
            "_ABSENT = (State.STARTING, State.DEAD, State.UNREADY)",
        ),
        ("a lease is not renewed", "sidecar/registration.py", "return self._lease / RENEWALS", "return math.inf"),
        (
            "what was not taken is not said again",
            "sidecar/registration.py",
            "return min(AGAIN, self._lease / RENEWALS)",
            "return math.inf",
        ),
        (
            "nothing is said after a withdrawal",
            "sidecar/registration.py",
            "if word != self._word:",
            "if word != self._word and not isinstance(self._word, Away):",
        ),
        (
            "a lease for another URL",
            "sidecar/registration.py",
            'body: dict[str, Any] = {"url": word.url}',
            'body: dict[str, Any] = {"url": word.url + "/v1"}',
        ),
    )
)
