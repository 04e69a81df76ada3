"""Every other path that a call of gRPC can answer: what it asks, and how its HTTP twin spells the answer.

Each handler gives an `Answer`; it raises `CannotCarry` for what gRPC has no field for, and what calls raise.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

import msgspec

from dyn_relay.direct.answer import spelled
from dyn_relay.direct.engine import QUICK, Engine
from dyn_relay.direct.errors import JSON
from dyn_relay.direct.numbers import CannotCarry, int32
from dyn_relay.direct.request import boolean, ids, string
from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.metadata import Metadata
from dyn_relay.grpc.methods import Method, Q, R
from dyn_relay.http11.headers import Headers
from dyn_relay.http11.server import Request

#: Seconds for what takes as long as it takes: loading weights.
SLOW = 1800.0
_TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes = b""
    headers: Headers | tuple[()] = ()

    @classmethod
    def of(cls, value: object, status: int = 200) -> Reply:
        """JSON."""
        return cls(status, msgspec.json.encode(value), JSON)


@dataclass(frozen=True, slots=True)
class Control:
    """One request for something else than a generation."""

    engine: Engine
    request: Request
    metadata: Metadata

    async def _call(self, method: Method[Q, R], message: Q, timeout: float = QUICK) -> R:
        return await self.engine.channels.unary(method, message, timeout=timeout, metadata=self.metadata)

    def _body(self, *names: str, **neutral: tuple[object, ...]) -> dict[str, Any]:
        """The body's fields: none but `names`, and those of `neutral` with a value that asks for nothing.

        Raises `CannotCarry`.
        """
        if not self.request.body:
            return {}
        try:
            body = msgspec.json.decode(self.request.body, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise CannotCarry("body", str(exc)) from None
        for name, value in body.items():
            if name not in names and value is not None and value not in neutral.get(name, ()):
                raise CannotCarry(name, f"cannot be carried over gRPC with {self.request.path}")
        return {name: value for name, value in body.items() if value is not None}

    # -- how it is

    async def health(self) -> Reply:
        """200 if a token comes from it, as stock's own."""
        return Reply(200 if await self.engine.works(self.metadata) else 503)

    async def ping(self) -> Reply:
        """200 if it calls itself well."""
        return Reply(200 if await self.engine.well(self.metadata) else 503)

    async def ready(self) -> Reply:
        """The same, and nobody has paused it."""
        state = await self.engine.state(self.metadata)
        return Reply(200 if state.healthy and not state.is_pause else 503)

    # -- what it is

    async def model_info(self) -> Reply:
        """As it is told; over gRPC some keys of HTTP's are missing."""
        said = await self._call(methods.GET_MODEL_INFO, pb.GetModelInfoRequest())
        return Reply(200, bytes(spelled(said.json_info)), JSON)

    async def server_info(self) -> Reply:
        """As it is told, and a version."""
        return Reply.of(await self.engine.server_info(self.metadata))

    async def models(self) -> Reply:
        """Its models, adapters among them."""
        said = await self._call(methods.LIST_MODELS, pb.ListModelsRequest())
        return Reply.of({"object": "list", "data": [_card(card) for card in said.models]})

    async def loads(self) -> Reply:
        """What it has to do, in the envelope of `/v1/loads`; nothing but ?dp_rank= can be asked for."""
        query = {name: values[-1] for name, values in parse_qs(self.request.query).items()}
        message = pb.GetLoadRequest()
        for name, value in query.items():
            if name == "dp_rank" and value.isdecimal():
                message.dp_rank = int32(name, int(value))
            elif (name, value) not in (("include", "all"), ("format", "json")):
                raise CannotCarry(name, f"{value} cannot be carried over gRPC with /v1/loads")
        said = await self._call(methods.GET_LOAD, message)
        now = datetime.fromtimestamp(time.time(), UTC).isoformat()
        return Reply.of({"timestamp": now, "loads": spelled(said.json_info)})

    # -- text

    async def tokenize(self) -> Reply:
        """Of one text or several."""
        body = self._body("model", "prompt", "add_special_tokens")
        special = boolean("add_special_tokens", body.get("add_special_tokens", True))
        prompt = body.get("prompt")
        many = [string("prompt", one) for one in (prompt if isinstance(prompt, list) else [prompt])]
        limit, tokens = -1, list[list[int]]()
        for text in many:
            said = await self._call(methods.TOKENIZE, pb.TokenizeRequest(text=text, add_special_tokens=special))
            limit = said.max_model_len
            tokens.append(list(said.tokens))
        told, count = (tokens, [*map(len, tokens)]) if isinstance(prompt, list) else (tokens[0], len(tokens[0]))
        return Reply.of({"tokens": told, "count": count, "max_model_len": limit})

    async def detokenize(self) -> Reply:
        """Of one list of ids or several, each asked for once. Special tokens are spelled as the engine spells them."""
        tokens = self._body("model", "tokens", "skip_special_tokens").get("tokens")
        nested = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
        lists = [tuple(ids("tokens", one)) for one in (tokens if nested else [tokens])]  # type: ignore[union-attr]
        texts: dict[tuple[int, ...], str] = {(): ""}
        for one in lists:
            if one not in texts:
                texts[one] = (await self._call(methods.DETOKENIZE, pb.DetokenizeRequest(tokens=one))).text
        return Reply.of({"text": [texts[one] for one in lists] if nested else texts[lists[0]]})

    # -- orders

    async def abort(self) -> Reply:
        """Always 200 and empty: SGLang does not say whether there was something to abort."""
        body = self._body("rid", "abort_all", abort_message=())
        everything, rid = boolean("abort_all", body.get("abort_all", False)), string("rid", body.get("rid", ""))
        if everything or rid.strip():
            await self._call(methods.ABORT, pb.AbortRequest(rid=rid, abort_all=everything))
        return Reply(200)

    async def flush(self) -> Reply:
        """200, or 400 while it has requests; the message is the same in both cases (SGLang 0.5.23)."""
        said = await self._call(methods.FLUSH_CACHE, pb.FlushCacheRequest())
        return Reply(200, _FLUSHED) if said.success else Reply(400, _BUSY)

    async def pause(self) -> Reply:
        """With a mode."""
        mode = string("mode", self._body("mode").get("mode", "abort"))
        if mode not in _MODES:
            raise CannotCarry("mode", f"{mode!r} is none of {', '.join(_MODES)}")
        await self._call(methods.PAUSE_GENERATION, pb.PauseGenerationRequest(mode=mode))
        return Reply.of({"message": "Generation paused successfully.", "status": "ok"})

    async def go_on(self) -> Reply:
        """The end of that."""
        self._body()
        await self._call(methods.CONTINUE_GENERATION, pb.ContinueGenerationRequest())
        return Reply.of({"message": "Generation continued successfully.", "status": "ok"})

    async def start_profile(self) -> Reply:
        """Into a folder of its own choice, or of the caller's."""
        body = self._body("output_dir")
        message = pb.StartProfileRequest()
        if "output_dir" in body:
            message.output_dir = string("output_dir", body["output_dir"])
        await self._call(methods.START_PROFILE, message)
        return Reply(200, b"Start profiling.\n", _TEXT)

    async def stop_profile(self) -> Reply:
        """It is written, which takes its time."""
        await self._call(methods.STOP_PROFILE, pb.StopProfileRequest(), SLOW)
        return Reply(200, b"Stop profiling. This will take some time.\n", _TEXT)

    async def update_weights(self) -> Reply:
        """From disk."""
        body = self._body("model_path", "load_format", **_WEIGHTS)
        message = pb.UpdateWeightsRequest(model_path=string("model_path", body.get("model_path")))
        if "load_format" in body:
            message.load_format = string("load_format", body["load_format"])
        said = await self._call(methods.UPDATE_WEIGHTS_FROM_DISK, message, SLOW)
        return Reply.of({"success": said.success, "message": said.message}, 200 if said.success else 400)


#: Of a pause. Another one ends the engine (SGLang 0.5.23): its HTTP server refuses it, its gRPC server does not look.
_MODES = ("abort", "retract", "in_place")
_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    b"operation will not be performed.)\n"
)
_BUSY = b"Flush cache failed.\n"
#: Values of `/update_weights_from_disk` that ask for nothing.
_WEIGHTS: dict[str, tuple[object, ...]] = {
    "abort_all_requests": (False,),
    "is_async": (False,),
    "torch_empty_cache": (False,),
    "keep_pause": (False,),
    "recapture_cuda_graph": (False,),
    "token_step": (0,),
    "flush_cache": (True,),
}

#: path -> (methods, handler). `/generate` is not among them.
ROUTES: dict[str, tuple[tuple[str, ...], Callable[[Control], Awaitable[Reply]]]] = {
    "/health": (("GET",), Control.health),
    "/health_generate": (("GET",), Control.health),
    "/ping": (("GET",), Control.ping),
    "/ready": (("GET",), Control.ready),
    "/model_info": (("GET",), Control.model_info),
    "/get_model_info": (("GET",), Control.model_info),
    "/server_info": (("GET",), Control.server_info),
    "/get_server_info": (("GET",), Control.server_info),
    "/v1/models": (("GET",), Control.models),
    "/v1/loads": (("GET",), Control.loads),
    "/tokenize": (("POST",), Control.tokenize),
    "/v1/tokenize": (("POST",), Control.tokenize),
    "/detokenize": (("POST",), Control.detokenize),
    "/v1/detokenize": (("POST",), Control.detokenize),
    "/abort_request": (("POST",), Control.abort),
    "/flush_cache": (("GET", "POST"), Control.flush),
    "/pause_generation": (("POST",), Control.pause),
    "/continue_generation": (("POST",), Control.go_on),
    "/start_profile": (("GET", "POST"), Control.start_profile),
    "/stop_profile": (("GET", "POST"), Control.stop_profile),
    "/update_weights_from_disk": (("POST",), Control.update_weights),
}


def _card(card: pb.ModelCard) -> dict[str, object]:
    return {
        "id": card.id,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": card.root,
        "parent": card.parent if card.HasField("parent") else None,
        "max_model_len": card.max_model_len if card.HasField("max_model_len") else None,
    }
