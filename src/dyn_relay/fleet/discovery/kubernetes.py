"""The workers of a Kubernetes cluster: the ready pods that a label selector finds, as SMG finds them.

List, then watch from the list's version, as every client of the API does: a watch that ends is taken up where it ended;
one whose version the server has forgotten (410 Gone) begins with a new list. Way and credentials come from lightkube
(the pod's service account, else `KUBECONFIG`, else `~/.kube/config`); of a pod only what is needed is decoded.

A pod that is being terminated is no worker any more, and one that is not ready is none while any is: a busy SGLang
fails its readiness probe, and if all do so at once, their fleet must not be empty. Then those that were in use stay,
and the proxy's own probes judge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import httpx2
import msgspec
import trio
from lightkube import KubeConfig
from lightkube.config.client_adapter import AsyncClient, ConnectionParams

from dyn_relay.fleet.discovery.base import Report, Source, SourceError
from dyn_relay.http11.origin import Origin

#: Seconds that the server may take to begin an answer.
TIMEOUT = 10.0
#: Seconds after which the server ends a watch, and silence after which the connection is taken for dead. A connection
#: whose peer is gone without a word would otherwise look like a fleet that does not change.
WATCH, SILENCE = 300, 330.0
#: Seconds between two watches: a server that is shutting down ends each at once.
BETWEEN = 1.0
#: Pods in one page of a list.
PAGE = 500


class Metadata(msgspec.Struct, rename="camel"):
    """Of a pod, of a list, or of a bookmark."""

    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    continue_: str = msgspec.field(name="continue", default="")


class Condition(msgspec.Struct):
    """One of a pod's conditions."""

    type: str
    status: str


class Status(msgspec.Struct):
    """A pod's."""

    phase: str = ""
    address: str = msgspec.field(name="podIP", default="")
    conditions: Sequence[Condition] = ()


class Pod(msgspec.Struct):
    """What is read of a pod."""

    metadata: Metadata
    status: Status = msgspec.field(default_factory=Status)

    @property
    def runs(self) -> bool:
        """It has an address, and nobody has told it to end."""
        return self.status.phase == "Running" and bool(self.status.address) and not self.metadata.deletion_timestamp

    @property
    def ready(self) -> bool:
        """It runs and passes its readiness probes and gates."""
        return self.runs and any(one.type == "Ready" and one.status == "True" for one in self.status.conditions)


class Page(msgspec.Struct):
    """One page of a list."""

    metadata: Metadata
    items: list[Pod]


class Event(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Failure(msgspec.Struct):
    """The API's own word for an error."""

    code: int = 0
    message: str = ""


class _Gone(Exception):
    """The server has forgotten the version that was asked for."""


class Pods(Source):
    """The pods that carry all labels of `selector` (`key=value`), in `namespace` or in all; they listen on `port`."""

    name = "kubernetes"

    def __init__(self, selector: Sequence[str], namespace: str | None, port: int) -> None:
        self._path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        self._selector = ",".join(selector)
        self._port = port
        self._used: list[str] = []

    async def run(self, report: Report) -> None:
        async with _client() as client:
            while True:
                try:
                    pods, version = await self._list(client)
                    report(self._origins(pods))
                    while True:
                        version = await self._watch(client, pods, version, report)
                        await trio.sleep(BETWEEN)
                except _Gone:
                    await trio.sleep(BETWEEN)
                except httpx2.HTTPError as exc:
                    raise SourceError(f"{client.base_url}: {exc or type(exc).__name__}") from exc
                except msgspec.MsgspecError as exc:
                    raise SourceError(f"{client.base_url}: an answer makes no sense: {exc}") from exc

    async def _list(self, client: httpx2.AsyncClient) -> tuple[dict[str, Pod], str]:
        """All pods by uid, and the version at which that was so."""
        pods: dict[str, Pod] = {}
        more = ""
        while True:
            asked: dict[str, str | int] = {"labelSelector": self._selector, "limit": PAGE}
            if more:
                asked["continue"] = more
            answer = await client.get(self._path, params=asked)
            _check(answer.status_code, answer.content)
            page = msgspec.json.decode(answer.content, type=Page)
            pods |= {pod.metadata.uid: pod for pod in page.items}
            more = page.metadata.continue_
            if not more:
                return pods, page.metadata.resource_version

    async def _watch(self, client: httpx2.AsyncClient, pods: dict[str, Pod], version: str, report: Report) -> str:
        """Keep `pods` up to date until the watch ends; the version at which it did. Raises `_Gone`."""
        asked: dict[str, str | int] = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": WATCH,
        }
        limits = httpx2.Timeout(TIMEOUT, read=SILENCE)
        async with client.stream("GET", self._path, params=asked, timeout=limits) as answer:
            if answer.status_code != httpx2.codes.OK:
                _check(answer.status_code, await answer.aread())
            rest = b""

            def take(data: bytes) -> None:
                nonlocal rest, version
                # Not the library's lines: those also end at characters that may stand within a text.
                *lines, rest = (rest + data).split(b"\n")
                for line in filter(None, lines):
                    version = _apply(line, pods)
                report(self._origins(pods))

            try:
                await _read(answer, take)
            except httpx2.TransportError:
                pass  # what was heard is true; whether the server is still there, the next watch will tell
        return version

    def _origins(self, pods: dict[str, Pod]) -> list[Origin]:
        ready = [uid for uid, pod in pods.items() if pod.ready]
        self._used = ready or [uid for uid in self._used if uid in pods and pods[uid].runs]
        return [Origin(pods[uid].status.address, self._port) for uid in self._used]


def _client() -> httpx2.AsyncClient:
    try:
        config = KubeConfig.from_env().get()
        assert config is not None, "no context is chosen"
        if config.user and config.user.exec:
            raise ValueError("a user that is made by a program (`exec`) is not supported; give it a token")
        client = AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(TIMEOUT)))
    except Exception as exc:  # whatever is wrong with files that are not ours
        raise SourceError(f"no way to the API server is configured: {exc or type(exc).__name__}") from exc
    # Requests are minutes apart: a connection that was kept may have been closed by the server meanwhile.
    client.headers["connection"] = "close"
    return client


async def _read(answer: httpx2.Response, take: Callable[[bytes], None]) -> None:
    """Give all bytes of an answer to `take`; raises what it raises.

    The library reads through generators within generators, and leaving the outermost leaves the others half-way. A
    cancellation ends them all.
    """
    failure: Exception | None = None
    with trio.CancelScope() as reading:
        async for data in answer.aiter_bytes():
            try:
                if failure is None:
                    take(data)
            except Exception as exc:
                failure = exc
                reading.cancel()
    if failure is not None:
        raise failure


def _apply(line: bytes, pods: dict[str, Pod]) -> str:
    """Do to `pods` what one event of a watch says; the version at which it was so. Raises `_Gone`, `SourceError`."""
    event = msgspec.json.decode(line, type=Event)
    if event.type == "ERROR":
        _check(msgspec.json.decode(event.object, type=Failure).code, bytes(event.object))
    pod = msgspec.json.decode(event.object, type=Pod)
    if event.type == "DELETED":
        pods.pop(pod.metadata.uid, None)
    else:  # a bookmark is a pod of nothing but a version, and no worker
        pods[pod.metadata.uid] = pod
    return pod.metadata.resource_version


def _check(status: int, body: bytes) -> None:
    """Raise what an answer of the API means that is no good one."""
    if status == httpx2.codes.GONE:
        raise _Gone
    if status != httpx2.codes.OK:
        try:
            message = msgspec.json.decode(body, type=Failure).message
        except msgspec.MsgspecError:
            message = ""
        raise SourceError(f"the API server answers {status}: {message or repr(body[:200])}")
