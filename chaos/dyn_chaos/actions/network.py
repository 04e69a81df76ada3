"""Packets between the proxy and a worker are lost: all of them, or some."""

from __future__ import annotations

from typing import Any

from dyn_chaos import audit
from dyn_chaos.actions.base import SEEN, Scene
from dyn_chaos.fleet import Engine


class Drop:
    """Drops a share of the packets, both ways, inside the worker's network namespace."""

    within = SEEN
    outlasts = False  # the namespace goes

    def __init__(self, share: float) -> None:
        """`share`: in (0, 1]; 1 is a partition, silent: nothing is refused, nothing is reset."""
        self._share = share
        self.kind = "partition" if share == 1 else "loss"

    async def invoke(self, scene: Scene, engine: Engine) -> dict[str, Any]:
        """Begin."""
        assert engine.namespace is not None
        await engine.namespace.drop(self._share)
        return {"share": self._share}

    async def undo(self, scene: Scene, engine: Engine) -> None:
        """End."""
        assert engine.namespace is not None
        await engine.namespace.heal()

    async def seen(self, scene: Scene, engine: Engine) -> str:
        """A partition: its health is silent. Loss: packets were lost."""
        assert engine.namespace is not None
        if self._share < 1:
            lost = await engine.namespace.dropped()
            return f"{lost} packets were lost" if lost else ""
        silent = await audit.health(engine.url) == audit.SILENCE
        return "it cannot be reached, /health is silent" if silent else ""
