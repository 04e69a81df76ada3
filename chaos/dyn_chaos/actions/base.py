"""The protocol of an action, and the two functions that let none get away without having done it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from dyn_chaos import audit
from dyn_chaos.fleet import Engine

#: Seconds in which a fault must be there once it was invoked; the proxy must see that it is over in the longer time.
SEEN = 5.0
OVER = 60.0
#: Seconds that an engine may take to say that it is well: SGLang (0.5.23) generates a token, and looks once a second.
WELL = 5.0


@dataclass(frozen=True, slots=True)
class Scene:
    """Where actions take place."""

    relay: str
    http: httpx.AsyncClient

    async def serving(self, engine: Engine) -> bool:
        """The proxy sends new requests to it."""
        return (await audit.states(self.http, self.relay)).get(engine.url) == "ready"


class Action(Protocol):
    """Something that is done to one worker at a time."""

    @property
    def kind(self) -> str:
        """The `Fault.kind` of the history."""

    @property
    def within(self) -> float:
        """Seconds that may pass from `invoke` until it is seen."""

    @property
    def outlasts(self) -> bool:
        """It would stay if the campaign was broken off: it must be undone then, too."""

    async def invoke(self, scene: Scene, engine: Engine) -> dict[str, Any]:
        """Do it; says what exactly. Raises `OSError` or `LookupError` if there is nothing to strike."""

    async def undo(self, scene: Scene, engine: Engine) -> None:
        """Undo it."""

    async def seen(self, scene: Scene, engine: Engine) -> str:
        """What is to be seen of it; "" if nothing is."""


@dataclass(slots=True)
class Deed:
    """What an action did, and how it is known."""

    #: "" if nothing was to be seen.
    proof: str
    choice: dict[str, Any] = field(default_factory=dict)


async def strike(action: Action, scene: Scene, engine: Engine) -> Deed:
    """Do it and look for it."""
    try:
        choice = await action.invoke(scene, engine)
    except (OSError, LookupError) as error:
        return Deed("", {"problem": str(error)})
    return Deed(await audit.wait_for(lambda: action.seen(scene, engine), action.within), choice)


async def undo(action: Action, scene: Scene, engine: Engine, within: float = OVER) -> str:
    """Undo it and look whether all is well: it is not seen any more, and the proxy uses the worker. "" if not."""

    async def well() -> str:
        if await audit.health(engine.url, WELL) != "200" or not await scene.serving(engine):
            return ""
        return "" if await action.seen(scene, engine) else "its /health is 200, and the proxy uses it"

    await action.undo(scene, engine)
    return await audit.wait_for(well, within)
