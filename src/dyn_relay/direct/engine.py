"""One engine behind gRPC: its calls, and what the gateway has to know of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec
import structlog
import trio

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.channels import Channels
from dyn_relay.grpc.metadata import Metadata
from dyn_relay.grpc.status import CallFailed
from dyn_relay.net import ConnectFailed

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("direct")

#: Seconds for a call that an engine answers from memory.
QUICK = 30.0
#: Seconds in which a token must come from an engine that is well (SGLANG_HEALTH_CHECK_TIMEOUT of SGLang 0.5.23).
HEALTH_TIMEOUT = 20.0
#: SGLang 0.5.23 tells no version over gRPC. This service, with text beside ids, is that of this release and later ones.
SPOKEN = "0.5.23"
#: Tokens an event below which a cumulative engine's unary answers cost more than they should.
SPARSE = 32
#: A prefill or decode engine takes a request that meets nobody if it is to meet there (disaggregation/utils.py).
_NOBODY = pb.DisaggregatedParams(bootstrap_host="2.2.2.2")

#: Seconds between two looks at its load, and until a health check is sent anew.
_LOAD_INTERVAL, _PATIENCE = 1.0, 5.0

_object = msgspec.json.Decoder(dict[str, object])


class _Load(msgspec.Struct):
    """What a rank's scheduler wrote down when it last had a batch's results (`load_snapshot.py`)."""

    timestamp: float = 0.0
    dp_rank: int = 0
    num_running_reqs: int = 0


_loads = msgspec.json.Decoder(list[_Load])


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine has said of itself in its server info."""

    #: As many connections were made to it then: over a later one there may be another process.
    known: int
    #: Streams are incremental rather than cumulative.
    incremental: bool
    #: It takes texts.
    tokenizer: bool
    #: Prefill or decode: a request must have its other half.
    paired: bool
    #: Media that it hears of.
    features: frozenset[str]
    #: Its HTTP server's; None: it did not say.
    http_port: int | None


class Engine:
    """The engine at the other end of `channels`."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self._facts: Facts | None = None
        #: Not set while somebody asks for them.
        self._asked = trio.Event()
        self._asked.set()
        #: It is cumulative, and tells of few tokens at a time.
        self._dense = False
        #: Messages of generations that have come, of all requests.
        self._heard = 0
        self._hearing = trio.lowlevel.ParkingLot()

    def hear(self) -> None:
        """A message of a generation has come: its scheduler works."""
        self._heard += 1
        self._hearing.unpark_all()

    async def server_info(self, metadata: Metadata = ()) -> dict[str, object]:
        """What it says of itself. Raises `ConnectFailed`, `CallFailed`, `ValueError`."""
        known = self.channels.made
        said = await self.channels.unary(
            methods.GET_SERVER_INFO, pb.GetServerInfoRequest(), timeout=QUICK, metadata=metadata
        )
        info = {"version": SPOKEN} | _object.decode(said.json_info)
        incremental, interval = info.get("incremental_streaming_output") is True, info.get("stream_interval")
        before, self._dense = self._dense, not incremental and not (isinstance(interval, int) and interval >= SPARSE)
        if self._dense and not before:
            advice = "start it with --incremental-streaming-output, or a long --stream-interval"
            log.warning("each token of this engine brings all of its answer so far", advice=advice)
        features, port = info.get("grpc_features"), info.get("port")
        self._facts = Facts(
            known=known,
            incremental=incremental,
            tokenizer=info.get("skip_tokenizer_init") is not True,
            paired=info.get("disaggregation_mode") in ("prefill", "decode"),
            features=frozenset(map(str, features)) if isinstance(features, list) else frozenset(),
            http_port=port if type(port) is int and 0 < port < 65536 else None,
        )
        return info

    async def facts(self, metadata: Metadata = ()) -> Facts:
        """What the process says that calls go to now. Raises as `server_info`.

        Who comes while another asks waits for that answer, and asks itself only if there was none: of another's key it
        says nothing, and at an engine that hangs nobody waits more than twice.
        """
        await self.channels.reach()
        told = True
        while (facts := self._facts) is None or facts.known != self.channels.made:
            if self._asked.is_set() or not told:
                return await self._ask(metadata)
            await self._asked.wait()
            told = self._facts is not facts
        return facts

    async def _ask(self, metadata: Metadata) -> Facts:
        self._asked = asked = trio.Event()
        try:
            await self.server_info(metadata)
        finally:
            asked.set()
        assert self._facts is not None
        return self._facts

    async def state(self, metadata: Metadata = ()) -> pb.EngineStateSnapshot:
        """Whether it calls itself well, and paused. Raises `ConnectFailed`, `CallFailed`."""
        watch = methods.WATCH_ENGINE_STATE, pb.WatchEngineStateRequest()
        async with self.channels.call(*watch, timeout=QUICK, metadata=metadata) as call:
            async for snapshot in call:
                return snapshot
        return pb.EngineStateSnapshot()

    async def well(self, metadata: Metadata = ()) -> bool:
        """Does it call itself well? That is no proof, see `works`. Raises `ConnectFailed`, `CallFailed`."""
        said = await self.channels.unary(
            methods.HEALTH_CHECK, pb.HealthCheckRequest(), timeout=QUICK, metadata=metadata
        )
        return said.healthy

    async def works(self, metadata: Metadata = ()) -> bool:
        """As SGLang's own `/health`: it calls itself well, and some token comes, of a request of ours or of any other.

        A busy scheduler drops a health check without a word (0.5.23, `process_input_requests`); over HTTP it says
        that it is at work, here only its load does. One that is paused gives no token.
        Raises `ConnectFailed`, `CallFailed`.
        """
        state = await self.state(metadata)
        if not state.healthy or state.is_pause:
            return state.healthy
        request = pb.GenerateRequest(input_ids=[0], rid=_health_check(), stream=False)
        request.sampling_params.max_new_tokens = 1
        request.sampling_params.temperature = 0.0
        if (await self.facts(metadata)).paired:
            request.disaggregated_params.CopyFrom(_NOBODY)
        with trio.move_on_after(HEALTH_TIMEOUT):
            return await self._gives_a_token(request, metadata)
        return False

    async def _gives_a_token(self, request: pb.GenerateRequest, metadata: Metadata) -> bool:
        before, errors = self._heard, list[Exception]()
        async with trio.open_nursery() as nursery:

            async def others() -> None:
                while self._heard == before:
                    await self._hearing.park()
                nursery.cancel_scope.cancel()

            nursery.start_soon(others)
            nursery.start_soon(self._watch_load, metadata)
            try:
                while self._heard == before:
                    with trio.move_on_after(_PATIENCE):  # one that came to a busy engine is never answered
                        async with self.channels.call(methods.GENERATE, request, metadata=metadata) as call:
                            async for _ in call:
                                self.hear()
                        break
                    request.rid = _health_check()
            except Exception as exc:  # carried out of the nursery as it is
                errors.append(exc)
            nursery.cancel_scope.cancel()
        if errors:
            raise errors[0]
        return self._heard > before

    async def _watch_load(self, metadata: Metadata) -> None:
        """Hear of the requests of others, whose messages go elsewhere: a scheduler at work says so again and again."""
        before: dict[object, object] = {}
        while True:
            try:
                said = await self.channels.unary(
                    methods.GET_LOAD, pb.GetLoadRequest(), timeout=QUICK, metadata=metadata
                )
                loads = _loads.decode(said.json_info)
            except (ConnectFailed, CallFailed, msgspec.MsgspecError):
                return  # then this says nothing of it
            now: dict[object, object] = {load.dp_rank: load.timestamp for load in loads if load.num_running_reqs > 0}
            if any(rank in before and when != before[rank] for rank, when in now.items()):
                self.hear()
            before = now
            await trio.sleep(_LOAD_INTERVAL)


def _health_check() -> str:
    return f"HEALTH_CHECK_{secrets.token_hex(16)}"
