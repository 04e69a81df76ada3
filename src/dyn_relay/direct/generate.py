"""`/generate`: one request over gRPC, answered as SGLang's HTTP server answers it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import msgspec
import trio
from msgspec import Raw

from dyn_relay.direct.answer import NotAnAnswer, aborted, finished, render, told_as_deltas
from dyn_relay.direct.engine import QUICK, Engine, Facts
from dyn_relay.direct.errors import JSON, Answer, Meaning, abandoned, answer, internal, meaning
from dyn_relay.direct.numbers import CannotCarry
from dyn_relay.direct.request import MEDIA, Asked
from dyn_relay.direct.whole import Whole
from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.channels import Call
from dyn_relay.grpc.metadata import Metadata
from dyn_relay.grpc.status import CallFailed, Refused
from dyn_relay.http11.headers import Headers
from dyn_relay.http11.server import ServerConnection
from dyn_relay.net import ConnectFailed

_EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
_DONE = b"data: [DONE]\n\n"


class Broken(Exception):
    """The engine is lost, or has said what makes no sense: the answer ends as if its HTTP server had died."""


class Generation:
    """One request. `run` answers it; leaving it early cancels the call at the engine."""

    def __init__(
        self, engine: Engine, facts: Facts, asked: Asked, metadata: Metadata, served: ServerConnection
    ) -> None:
        """`facts`: those that the request was written by."""
        self._engine = engine
        self._facts = facts
        self._asked = asked
        self._metadata = metadata
        self._served = served
        self._began = trio.current_time()
        self._prompt_ids: Raw | None = None
        #: The newest message, and how many tokens the newest event told.
        self._last: pb.GenerateResponse | None = None
        self._told = 0
        #: What the client is to get: a stream, or all at once.
        self._streams = asked.message.stream
        self._whole = Whole()

    async def run(self) -> None:
        """Answer. Raises `CannotCarry` and `Newer` before anything was sent, `Broken`, `ConnectionBroken`."""
        asked = self._asked
        try:
            for name in asked.media:
                if MEDIA[name] not in self._facts.features:
                    raise CannotCarry(name, f"the engine does not say that it hears of {MEDIA[name]} over gRPC")
            await self._tokenize()
            if asked.prompt_ids:
                self._prompt_ids = Raw(msgspec.json.encode(list(asked.message.input_ids)))
            await (self._stream() if self._streams else self._unary())
        except (ConnectFailed, CallFailed) as exc:
            await self._failed(exc)
        except (NotAnAnswer, msgspec.MsgspecError) as exc:
            raise Broken(str(exc)) from exc

    async def _tokenize(self) -> None:
        """Make ids of a text: only an answer to ids tells its own ids (SGLang 0.5.23, `TextGenerate`)."""
        text, rid = self._asked.text, self._asked.message.rid
        if text is None:
            return
        if not self._facts.tokenizer:
            # Only to hear in its own words that it takes no texts.
            refused = pb.TextGenerateRequest(text=text, rid=rid)
            await self._engine.channels.unary(methods.TEXT_GENERATE, refused, timeout=QUICK, metadata=self._metadata)
            raise Broken("an engine without a tokenizer has taken a text")
        said = await self._engine.channels.unary(
            methods.TOKENIZE, pb.TokenizeRequest(text=text), timeout=QUICK, metadata=self._metadata
        )
        self._asked.message.input_ids.extend(said.tokens)

    async def _unary(self) -> None:
        if self._asked.samples > 1:
            await self._several()
            return
        over = False
        async with self._call(stream=True) as call:
            async for message in call:
                self._engine.hear()
                if message.meta_info:
                    self._whole.add(message)
                    over = finished(message)
        whole = self._whole.message
        if whole is None or not over:
            raise Broken("the answer has ended without a finish")
        refusal = abandoned(msgspec.json.decode(whole.meta_info["finish_reason"]))
        if refusal is not None:
            await self._say(refusal)
            return
        await self._served.respond(200, JSON, self._render(whole))

    async def _several(self) -> None:
        """Of several samples no message of a stream says which one it belongs to."""
        parts: list[bytes] = []
        async with self._call(stream=False) as call:
            async for message in call:
                self._engine.hear()
                parts.append(self._render(message))
        if len(parts) != self._asked.samples:
            raise Broken(f"{len(parts)} messages instead of {self._asked.samples}")
        await self._served.respond(200, JSON, b"[" + b",".join(parts) + b"]")

    async def _stream(self) -> None:
        interval = self._asked.interval
        over = False
        async with self._call(stream=True) as call:
            async for message in call:
                self._engine.hear()
                if not message.meta_info:
                    continue  # SGLang 0.5.23 ends a stream with it that has had no finish
                self._last, over = message, finished(message)
                early = not over and self._told and len(message.output_ids) < self._told + interval
                if early and not told_as_deltas(message):  # what those leave out no later one tells
                    continue
                self._told = len(message.output_ids)
                await self._event(b"data: " + self._render(message) + b"\n\n")
        if not over:
            raise Broken("the stream has ended without a finish")
        await self._event(_DONE, last=True)

    def _call(self, *, stream: bool) -> AbstractAsyncContextManager[Call[pb.GenerateResponse]]:
        self._asked.message.stream = stream
        known = self._facts.known
        return self._engine.channels.call(methods.GENERATE, self._asked.message, metadata=self._metadata, known=known)

    def _render(self, message: pb.GenerateResponse) -> bytes:
        return render(message, self._prompt_ids, trio.current_time() - self._began)

    async def _event(self, data: bytes, *, last: bool = False) -> None:
        served = self._served
        head = b"" if served.started else served.head(200, _EVENT_STREAM)
        await served.connection.send(served.frame(data, head, last=last))

    async def _failed(self, failure: ConnectFailed | CallFailed) -> None:
        """Answer as an HTTP server does. Raises `Broken` if it would have died, `ConnectionBroken`."""
        found = meaning(failure)
        if found is Meaning.ABORTED:
            await self._aborted()
        elif self._last is not None or self._whole.message is not None or found is Meaning.DEATH:
            raise Broken(str(failure)) from failure
        elif found is Meaning.SAID:
            assert isinstance(failure, Refused)
            await self._say(internal(failure.message, await self._well()))
        else:
            await self._say(answer(failure))

    async def _well(self) -> bool:
        try:
            return await self._engine.well(self._metadata)
        except (ConnectFailed, CallFailed) as exc:
            raise Broken(str(exc)) from exc

    async def _aborted(self) -> None:
        """Somebody has aborted it: over gRPC no message says so."""
        asked, last = self._asked.message, self._last if self._streams else self._whole.message
        # The first message of all may be either: then the engine's own word counts.
        deltas = self._last is not None and (told_as_deltas(self._last) or self._facts.incremental)
        end = aborted(last, asked.rid, self._prompt_ids, incremental=deltas, logprobs=asked.return_logprob)
        if self._streams:
            await self._event(b"data: " + end + b"\n\n" + _DONE, last=True)
        else:
            await self._served.respond(200, JSON, end)

    async def _say(self, said: Answer) -> None:
        if self._streams and said.event is not None:
            await self._event(said.event + _DONE, last=True)
        else:
            await self._served.respond(said.status, JSON, said.body)
