"""Prefill and decode: what each of the two workers of an attempt is sent. `prefilled.py` joins their answers.

Source: SGLang 0.5.23. Both get the same request, with the same room: the prefill worker computes the prompt and one
token, hands the cache over, and then answers with that token and all `input_*` of the prompt (prefill.py:1014, :1219).
The decode worker answers with every token, and has no `input_*` (output_streamer.py:566). So the client gets decode's
answer with prefill's `input_*` in it.
"""

from __future__ import annotations

from dyn_relay.formats.sglang.affinity import pinned
from dyn_relay.formats.sglang.batch import Asked, asked
from dyn_relay.formats.sglang.continuation import placed
from dyn_relay.formats.sglang.request import ABSENT, Request
from dyn_relay.formats.sglang.wire import Fields, raw
from dyn_relay.formats.traits import Pairing

ROOM = "bootstrap_room"
#: What ties the two legs together: a room that is used twice crashes both workers (SGLang's issue 40125). A client's
#: own fields are refused, unless it is trusted.
TIES = ("bootstrap_host", "bootstrap_port", ROOM, "disagg_prefill_dp_rank")
_ROOMS = range(1, 2**63)


def flaw(request: Request) -> str:
    """What is wrong with the rooms that a client names, "" if nothing: they would hang both workers, or crash them."""
    value, want = request.value(ROOM), asked(request)
    if value is ABSENT or value is None:
        return ""
    rooms = value if isinstance(value, list) and want.several else [value]
    if len(rooms) != want.prompts:
        return f"{ROOM}: {want.prompts} prompts want as many rooms, not {len(rooms)}."
    if not all(type(room) is int and room in _ROOMS for room in rooms):
        return f"{ROOM} must be an integer from 1 to {_ROOMS[-1]}."
    return "" if len(set(rooms)) == len(rooms) else f"{ROOM}: two prompts must not share a room."


def legs(request: Request, pairing: Pairing, decode: Fields, *, first: bool, whole: bool) -> tuple[Fields, Fields]:
    """What the decode worker's request has beside its rank's fields, `decode`, and what the prefill worker's has.

    A batch names a room for each of its prompts. The `first` attempt has what the client names of its own, a room only
    if no live request has it; a worker that still has it would crash of it, so that no later attempt has. The client
    may also name a rank to both, of which decode must be told: without that it looks where the room says, and waits
    there for its timeout. A request that goes out `whole` names it in every attempt.
    """
    want = asked(request)

    def own(name: str) -> bool:
        return first and request.value(name) not in (ABSENT, None)

    fields = {
        "bootstrap_host": raw([pairing.host] * want.prompts if want.several else pairing.host),
        "bootstrap_port": raw([pairing.port] * want.prompts if want.several else pairing.port),
    }
    fields = {name: value for name, value in fields.items() if not own(name)}
    given = request.value(ROOM) if own(ROOM) else None
    rooms = _rooms(given, want, pairing)
    if given not in (rooms, rooms[0]):
        fields[ROOM] = raw(rooms if want.several else rooms[0])
    if pairing.rank is None:
        named = pinned(request) if first or whole else None
        follows = named is not None and named >= 0 and not own("disagg_prefill_dp_rank")
        there: Fields = {"disagg_prefill_dp_rank": raw(named), **placed(pairing.traits, named)} if follows else {}
        return {**decode, **there, **fields}, fields
    return (
        {**decode, "disagg_prefill_dp_rank": raw(pairing.rank), **fields},
        {**placed(pairing.traits, pairing.rank), **fields},
    )


def _rooms(given: object, want: Asked, pairing: Pairing) -> list[int]:
    """One for each prompt: the client's if nobody has them, else new ones."""
    rooms = given if isinstance(given, list) else [given] * want.prompts
    return [room if type(room) is int and pairing.claim(room) else pairing.room() for room in rooms]
