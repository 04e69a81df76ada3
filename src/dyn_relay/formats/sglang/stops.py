"""Which tokens end an answer. Nothing on the wire names a model's EOS: it is learnt from the finishes of its engines.

It matters when a cut falls between an EOS and its finish: a continuation would run on past the EOS. Stock SGLang 0.5.23
always sends the finish with the last token, so there is no such place; engines that send it in an event of its own
(*late* ones) have it. What remains is such a cut of a late engine before any answer of its model was seen to end, late
or with EOS; and, of a model with several EOS ids, after one that was not among those seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dyn_relay.formats.sglang.events import Finish
from dyn_relay.formats.sglang.request import Request


@dataclass(slots=True)
class Stops:
    """What the engines of one model have shown."""

    #: Ids that ended answers though their requests did not name them.
    eos: set[int] = field(default_factory=set)
    #: An engine sent a finish that brought no token.
    late: bool = False

    def learn(self, request: Request, finish: Finish, before: int, total: int) -> None:
        """An engine's own finish of a migratable request; its event took the attempt from `before` to `total` tokens.

        Requests with a grammar must not come here: their `matched` may be any token.
        """
        self.late = self.late or before == total > 0
        matched = finish.matched
        if type(matched) is int and not request.ignore_eos and not request.names_stop(matched):
            self.eos.add(matched)

    def ends(self, request: Request, ids: int, last: int) -> bool:
        """Does the engine end an answer whose `ids`-th token is `last`?"""
        if request.ignore_eos or ids <= request.min_new_tokens:
            return False
        return last in self.eos or request.names_stop(last)

    def may_have_ended(self, request: Request, ids: int) -> bool:
        """Can an answer of `ids` tokens, cut by a late engine, have ended with an EOS that is not known here?"""
        return self.late and not self.eos and not request.ignore_eos and ids > request.min_new_tokens
