"""The engine's lease at one proxy: taken, renewed, and given back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
import trio

from dyn_relay.http11.client import BadResponse, Origin, Pool, fetch
from dyn_relay.http11.headers import Headers
from dyn_relay.net import ConnectFailed, ConnectionBroken

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("registration")

#: A lease is renewed so many times before it would lapse.
RENEWALS = 3
#: Seconds until a proxy that did not take a word is told it again, at most.
AGAIN = 1.0
#: Seconds that a proxy gets to answer, at most.
PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Here:
    """The engine is there. `worker_type`: what for, if it is known."""

    url: str
    worker_type: str | None


@dataclass(frozen=True, slots=True)
class Away:
    """It is not, or will not be: what still runs there after so many seconds is to go on elsewhere, if it can."""

    url: str
    after: float | None = None


class Registration:
    """What one proxy is to know, and whether it does. `run` tells it, again and again."""

    def __init__(self, pool: Pool, relay: Origin, lease_secs: float, api_key: str | None, instance: str) -> None:
        """`instance`: this process; one that takes its place has a lease of its own."""
        self.relay = relay
        #: What the proxy has answered last, for people.
        self.state = "never told"
        self._pool = pool
        self._lease = lease_secs
        self._instance = instance
        self._headers: Headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))
        self._word: Here | Away | None = None
        #: It may have the engine in its list.
        self._held = False
        #: When its lease there is over, if it is not renewed.
        self.ends = -math.inf
        self._heard = trio.Event()
        self._sending = trio.CancelScope()

    def tell(self, word: Here | Away) -> None:
        """From now on this is what it is to know."""
        if word != self._word:
            self._word, self._heard = word, trio.Event()
            self._sending.cancel()

    async def heard(self) -> None:
        """Return once the last word was taken."""
        await self._heard.wait()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            word = self._word
            with trio.CancelScope() as self._sending:
                pause = await self._say(word)
                await trio.sleep(pause)

    async def _say(self, word: Here | Away | None) -> float:
        """Seconds until it is to be said again."""
        if word is None:
            return math.inf
        if isinstance(word, Away) and not self._held:
            self._heard.set()
            return math.inf
        if isinstance(word, Here):
            self.ends = trio.current_time() + min(PATIENCE, self._lease) + self._lease
        taken = await self._post({**_body(word, self._lease), "instance": self._instance})
        if not taken:
            return min(AGAIN, self._lease / RENEWALS)
        self._heard.set()
        if isinstance(word, Away):
            self._held = False
            return math.inf
        return self._lease / RENEWALS

    async def _post(self, body: Mapping[str, Any]) -> bool:
        """Was it taken?"""
        data, held = msgspec.json.encode(body), self._held
        self._held = True  # from the first byte on
        try:
            answer = await fetch(
                self._pool,
                self.relay,
                "POST",
                "/workers",
                headers=list(self._headers),
                body=data,
                timeout=min(PATIENCE, self._lease),
                fresh=True,
            )
        except trio.TooSlowError:
            return self._note(False, "it does not answer")
        except ConnectFailed as exc:
            self._held = held
            return self._note(False, str(exc))
        except (ConnectionBroken, BadResponse) as exc:
            return self._note(False, str(exc))
        given_back = not body["lease_secs"]
        if answer.status == 202:
            return self._note(True, "withdrawn" if given_back else "registered")
        if given_back and answer.status == 404:
            return self._note(True, "not known there")
        if 400 <= answer.status < 500 and answer.status != 409:  # that lease is held, though it does not count
            self._held = held
        words = answer.body[:300].decode(errors="replace")
        return self._note(False, f"{answer.status}: {words}")

    def _note(self, taken: bool, state: str) -> bool:
        """A line whenever it is another one than the last."""
        if state != self.state:
            write = log.info if taken else log.warning
            write(
                "the proxy has taken it" if taken else "the proxy has not taken it", relay=str(self.relay), says=state
            )
        self.state = state
        return taken


def _body(word: Here | Away, lease: float) -> dict[str, Any]:
    body: dict[str, Any] = {"url": word.url}
    if isinstance(word, Away):
        return {**body, "lease_secs": 0, **({} if word.after is None else {"after": word.after})}
    return {**body, "lease_secs": lease, **({} if word.worker_type is None else {"worker_type": word.worker_type})}
