"""Bugs that the simulator must find: each is a few characters of the proxy, replaced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before`, which `file` of `dyn_relay` must hold once, becomes `after`."""

    name: str
    file: str
    before: str
    after: str


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
        'delivered = ",".join(map(str, ids)).encode()',
        'delivered = ",".join(map(str, ids[:-1] or ids)).encode()',
    ),
    Mutant(
        "dropped last token",
        "formats/sglang/exchange.py",
        "if request.max_new_tokens is not None and len(ids) >= request.max_new_tokens:",
        "if request.max_new_tokens is not None and len(ids) >= request.max_new_tokens - 1:",
    ),
    Mutant(
        "wrong exclusion",
        "relay/budget.py",
        "excluded=self.excluded | {failure.worker},",
        "excluded=self.excluded,",
    ),
    Mutant(
        "leaked lease",
        "fleet/lease.py",
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
        "formats/sglang/reader.py",
        '            return\n        if "text" in top:',
        '            pass\n        if "text" in top:',
    ),
    Mutant(
        "swapped dialect",
        "formats/sglang/reader.py",
        "dialect = self._dialect or self._attempt.dialect or",
        "dialect = self._attempt.dialect or self._dialect or",
    ),
    Mutant(
        "retry on 400",
        "relay/failure.py",
        "(Kind.REFUSED, Phase.ANSWERED): Rule(Action.RELAY),",
        "(Kind.REFUSED, Phase.ANSWERED): Rule(Action.REROUTE),",
    ),
)
