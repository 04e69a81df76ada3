"""The operator's way: the proxy is told to send nothing new to a worker; what runs there ends in peace, or moves."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from dyn_chaos import audit
from dyn_chaos.actions.base import OVER, SEEN, Scene
from dyn_chaos.actions.signals import Kill
from dyn_chaos.fleet import Engine

KIND = "drain"
#: In `Fault.choice`: how many requests were there, which must end in peace.
LIVE = "live requests"


class Drain:
    """Removes a worker from the proxy, and adds it again."""

    kind = KIND
    within = SEEN
    outlasts = False

    async def invoke(self, scene: Scene, engine: Engine) -> dict[str, Any]:
        """Remove it."""
        live = (await audit.loads(scene.http, scene.relay)).get(engine.url, 0)
        (await scene.http.delete(f"{scene.relay}/workers/{quote(engine.url, safe='')}")).raise_for_status()
        return {LIVE: int(live)}

    async def undo(self, scene: Scene, engine: Engine) -> None:
        """Add it."""
        (await scene.http.post(f"{scene.relay}/workers", json={"url": engine.url})).raise_for_status()

    async def seen(self, scene: Scene, engine: Engine) -> str:
        """The proxy does not use it, though it is well."""
        state = (await audit.states(scene.http, scene.relay)).get(engine.url, "not listed")
        return f"the proxy has it {state}" if state in ("draining", "not listed") else ""


class Replace:
    """Has the proxy move all that a worker does, ends its processes, starts it again and gives it back."""

    within = SEEN
    outlasts = False

    def __init__(self, kill: Kill) -> None:
        self.kind = kill.kind
        self._kill = kill

    async def invoke(self, scene: Scene, engine: Engine) -> dict[str, Any]:
        """Empty it, and end it once it is empty. Raises `LookupError` if it does not become so."""
        where = f"{scene.relay}/workers/{quote(engine.url, safe='')}"
        (await scene.http.post(f"{where}/drain", params={"after": "0"})).raise_for_status()

        async def empty() -> str:
            return "" if engine.url in await audit.states(scene.http, scene.relay) else "not listed"

        if not await audit.wait_for(empty, OVER):
            raise LookupError(f"the proxy still lists {engine.url} after {OVER:.0f} s")
        return await self._kill.invoke(scene, engine)

    async def undo(self, scene: Scene, engine: Engine) -> None:
        """Start it, and add it."""
        await self._kill.undo(scene, engine)
        (await scene.http.post(f"{scene.relay}/workers", json={"url": engine.url})).raise_for_status()

    async def seen(self, scene: Scene, engine: Engine) -> str:
        """Its processes are gone, and nobody listens."""
        return await self._kill.seen(scene, engine)
