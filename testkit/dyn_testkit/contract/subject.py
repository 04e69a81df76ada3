"""The worker under test: everything that is asked of it goes through here, bounded in time and remembered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from dyn_relay.net import ConnectFailed, Connection, Network
from dyn_testkit.client import Ongoing, Response, begin
from dyn_testkit.contract.facts import Facts
from dyn_testkit.contract.table import Broken, Inapplicable, Silent, equal, expect, short
from dyn_testkit.oracle import fold

#: A generation that is over in this part of the time wanted is over too soon.
_HURRIED = 4


@dataclass(slots=True)
class Exchange:
    """What was sent, and what came."""

    sent: str
    #: None: it was not taken.
    ongoing: Ongoing | None = None

    @property
    def response(self) -> Response:
        """The answer, as far as it has been read."""
        return Response() if self.ongoing is None else self.ongoing.response

    def came(self) -> str:
        """The answer in a line or two."""
        response = self.response
        if not response.status:
            return f"no answer ({response.broken})" if response.broken else "no answer"
        end = "" if response.complete else f" [cut: {response.broken or 'still open'}]"
        kind = response.header("content-type") or "no content type"
        text = response.body.decode("utf-8", "backslashreplace").strip()
        return f"{response.status} {kind}: {short(text, 600) or 'empty body'}{end}"


@dataclass(slots=True)
class Subject:
    """A worker, how to reach it, and what is known of it."""

    host: str
    port: int
    network: Network
    #: Seconds that one whole answer may take.
    patience: float
    prompt: Sequence[int]
    #: How far logprobs of one token may differ between two runs.
    tolerance: float
    #: What a generation that is disturbed while it runs would take undisturbed.
    live_seconds: float
    #: Longer prompts are not sent.
    longest_prompt: int
    api_key: str | None = None
    facts: Facts = field(default_factory=Facts)
    last: Exchange | None = None
    _names: int = 0

    @property
    def url(self) -> str:
        """Its base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def rid(self) -> str:
        """A name that was not used before. SGLang may abort the second user of a name up to 2 s after a stream."""
        self._names += 1
        return f"contract-{id(self):x}-{self._names}."

    def body(self, count: int = 8, *, sampling: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """A request for exactly `count` tokens at temperature 0; a key with the value `...` is left out."""
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True} | dict(sampling or {})
        known = {name: value for name, value in params.items() if value is not ...}
        asked = {"input_ids": list(self.prompt), "sampling_params": known} | more
        return {name: value for name, value in asked.items() if value is not ...}

    async def dial(self) -> Connection:
        """A new connection. Raises `Silent`."""
        try:
            with trio.fail_after(self.patience):
                return await self.network.connect(self.host, self.port)
        except ConnectFailed as exc:
            raise Silent(f"cannot connect to {self.url}: {exc}") from exc
        except trio.TooSlowError as exc:
            raise Silent(f"cannot connect to {self.url}: nothing happened for {self.patience:g} s") from exc

    async def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str | None] | None = None,
        over: Connection | None = None,
    ) -> Exchange:
        """One request and its whole answer, on a connection of its own or over a given one. Raises `Silent`."""
        if over is not None:
            return await self.read(await self.send(over, path, body, method=method, headers=headers))
        connection = await self.dial()
        try:
            closing = {"connection": "close", **(headers or {})}
            return await self.read(await self.send(connection, path, body, method=method, headers=closing))
        finally:
            connection.close()

    async def send(
        self,
        connection: Connection,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> Exchange:
        """Send a request; a header with the value None is left out. Raises `Silent`."""
        fields: dict[str, str | None] = {"host": self.url.removeprefix("http://")}
        if self.api_key is not None:
            fields["authorization"] = f"Bearer {self.api_key}"
        given = {name: value for name, value in (fields | dict(headers or {})).items() if value is not None}
        verb = method or ("GET" if body is None else "POST")
        exchange = self.last = Exchange(f"{verb} {path} {short(_spelled(body), 600)}".strip())
        with trio.move_on_after(self.patience):
            exchange.ongoing = await begin(connection, path, body, method=method, headers=given)
            return exchange
        raise Silent(f"the request was not taken within {self.patience:g} s")

    async def read(self, exchange: Exchange) -> Exchange:
        """Read the rest of an answer. Raises `Silent` unless it comes whole."""
        self.last = exchange
        assert exchange.ongoing is not None
        with trio.move_on_after(self.patience) as scope:
            await exchange.ongoing.rest()
        response = exchange.response
        if scope.cancelled_caught:
            raise Silent(f"no whole answer within {self.patience:g} s")
        if not response.complete:
            raise Silent(f"the answer is not whole HTTP: {response.broken or 'the connection ended'}")
        return exchange

    async def unary(self, body: Mapping[str, Any], **how: Any) -> Any:
        """The JSON value of a unary generation that must succeed."""
        exchange = await self.ask("/generate", {**body, "stream": False}, **how)
        return self.value_of(exchange)

    def value_of(self, exchange: Exchange) -> Any:
        """The JSON in an answer that must be a 200."""
        expect(exchange.response.status == 200, f"status {exchange.response.status}, the contract says 200")
        try:
            return exchange.response.json()
        except ValueError as exc:
            raise Broken(f"the body is not JSON: {exc}") from exc

    async def events(self, body: Mapping[str, Any], **how: Any) -> list[dict[str, Any]]:
        """The JSON values of a stream that must succeed and end with `[DONE]`."""
        return self.values_of(await self.ask("/generate", {**body, "stream": True}, **how))

    def values_of(self, exchange: Exchange) -> list[dict[str, Any]]:
        """The events in an answer that must be a whole stream."""
        response = exchange.response
        expect(response.status == 200, f"status {response.status}, the contract says 200")
        kind = response.header("content-type") or ""
        expect(kind.startswith("text/event-stream"), f"content type {kind!r}, the contract says text/event-stream")
        found = response.events()
        expect(found[-1:] == [b"[DONE]"], "the last event is not `data: [DONE]`")
        try:
            return response.values()
        except ValueError as exc:
            raise Broken(f"an event is not JSON: {exc}") from exc

    async def answer(self, body: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
        """The whole answer to a single request: the unary one, or what the stream adds up to."""
        if not stream:
            value: dict[str, Any] = await self.unary(body)
            return value
        return self.folded(await self.events(body))

    def folded(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the events of one stream add up to. Raises `Broken`, `Inapplicable`."""
        if self.facts.dialect is None:
            raise Inapplicable("the dialect of its streams is unknown: give dialect=")
        try:
            return fold(events, self.facts.dialect)
        except ValueError as exc:
            raise Broken(f"as {self.facts.dialect} events they do not add up: {exc}") from exc

    async def ids(self, body: Mapping[str, Any]) -> list[int]:
        """The tokens of a unary generation."""
        value = await self.unary(body)
        found: list[int] = value["output_ids"]
        return found

    @asynccontextmanager
    async def live(
        self, rid: str, share: float = 1.0, *, stream: bool = True, count: int | None = None
    ) -> AsyncIterator[Live]:
        """A generation that still runs: for `share` of `live_seconds`, if nobody ends it; or one of `count` tokens.

        Raises `Inapplicable`.
        """
        count = self.live_tokens(share) if count is None else count
        connection = await self.dial()
        try:
            live = Live(
                self,
                connection,
                await self.send(connection, "/generate", self.body(count, rid=rid, stream=stream)),
                count,
            )
            if stream:
                await live.first()
            yield live
        finally:
            connection.close()

    def live_tokens(self, share: float) -> int:
        """How many tokens take that long. Raises `Inapplicable` if the worker is too fast."""
        pace, wanted = self.facts.pace, self.live_seconds * share
        room = min(self.facts.context_length or self.longest_prompt, self.longest_prompt) - len(self.prompt) - 8
        count = min(room, round(wanted / pace) if pace else room)
        if count * pace < wanted / _HURRIED:
            raise Inapplicable(
                f"too fast: {room} tokens take {room * pace:.3g} s, so that nothing can be done to a generation while "
                f"it runs; slow it down, or lower live_seconds={self.live_seconds:g}"
            )
        return max(count, 2)


def _spelled(body: Any) -> str:
    if isinstance(body, bytes):
        return body.decode("utf-8", "backslashreplace")
    return "" if body is None else json.dumps(body)


@dataclass(slots=True)
class Live:
    """A generation in progress."""

    subject: Subject
    connection: Connection
    exchange: Exchange
    #: How many tokens it has if nobody ends it.
    count: int

    @property
    def ongoing(self) -> Ongoing:
        """Its answer, on its way."""
        assert self.exchange.ongoing is not None
        return self.exchange.ongoing

    async def first(self) -> dict[str, Any]:
        """The first event of a stream, which must be one of a generation that runs."""
        response = self.exchange.response
        with trio.move_on_after(self.subject.patience) as scope:
            while b"\n\n" not in b"".join(response.parts) and await self.ongoing.more():
                pass
        response.body = b"".join(response.parts)
        if scope.cancelled_caught:
            raise Silent(f"no event of a stream within {self.subject.patience:g} s")
        equal("status", response.status, 200)
        values = response.values()
        expect(bool(values), "the stream ended without an event")
        found: dict[str, Any] = values[0]
        return found

    async def shows(self, count: int) -> int:
        """Wait for an event with so many tokens, or for the end; how many the last event has."""
        response, shown = self.exchange.response, 0
        rest = b"".join(response.parts).rpartition(b"\n\n")[2]
        with trio.move_on_after(self.subject.patience):
            while shown < count and await self.ongoing.more():
                *events, rest = (rest + response.parts[-1]).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        shown = json.loads(event[6:])["meta_info"]["completion_tokens"]
        return shown

    async def rest(self) -> list[dict[str, Any]]:
        """All events, once the stream has ended."""
        return self.subject.values_of(await self.subject.read(self.exchange))

    async def ended(self, seconds: float) -> bool:
        """Wait for the whole answer, that long at most."""
        with trio.move_on_after(seconds):
            await self.ongoing.rest()
            return True
        return False
