"""`dyn-relay explain`: what would become of a request, asked of nobody, or of one worker's infos."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import trio

from dyn_relay.config import Config
from dyn_relay.direct.errors import refused
from dyn_relay.direct.gateways import Gateways
from dyn_relay.direct.numbers import CannotCarry
from dyn_relay.direct.request import translate
from dyn_relay.fleet.health import INFO_TIMEOUT
from dyn_relay.formats import catalog
from dyn_relay.formats.base import Answer, Explanation, Format, NativeRequest
from dyn_relay.formats.traits import UNKNOWN, Traits
from dyn_relay.http11.client import BadResponse, Origin, Pool, fetch
from dyn_relay.http11.headers import Headers
from dyn_relay.net import ConnectFailed, ConnectionBroken
from dyn_relay.relay.explain import described, explained
from dyn_relay.sockets import open_network

#: Longer arrays and strings are shortened for people.
_LONG = 12
_LONG_TEXT = 200
_JSON: Headers = [(b"content-type", b"application/json")]


class Unanswered(Exception):
    """The worker cannot be asked, or does not say what it is."""


def run(path: Path, worker: str | None, after: int, config: Config) -> dict[str, object]:
    """The explanation of the body in the file `path`, as a JSON object.

    `worker`: a URL. Raises `Unanswered`, and `ValueError` ("FIELD: ...") for what cannot be explained.
    """
    format = catalog.make(config.format, config.on_abort, config.weight_version_policy)
    traits = trio.run(_ask, format, worker, config) if worker else format.stock
    [native] = format.paths
    request = NativeRequest("POST", native, _JSON, path.read_bytes())
    found = explained(format, config, request, traits, after)
    if worker and Origin.parse(worker).grpc and found.index is None and not config.http_fallback:
        found = _over_grpc(found, request.body, traits)
    return described(found, traits, worker, after)


def _over_grpc(found: Explanation, body: bytes, traits: Traits) -> Explanation:
    """The same, unless gRPC cannot carry the request: then the engine's gateway refuses it."""
    try:
        translate(msgspec.json.decode(body, type=dict[str, object]), tokenizer=traits.text is not False)
    except CannotCarry as exc:
        said = refused(str(exc))
        answer = found.answer or Answer(said.status, said.body)
        return replace(found, answer=answer, continuation=None, stand_ins=(), needs=())
    except (msgspec.MsgspecError, RecursionError):
        pass  # the format says what is wrong with it
    return found


def text(found: dict[str, Any]) -> str:
    """The same for people."""
    [(header, value)] = found["header"].items()
    lines = [f"{header}: {value}"]
    if found["split"]:
        which = "the first that is refused" if not found["migratable"] else "and so on with the others"
        lines.append(f"  split into {found['split']['answers']}; this is number {found['split']['index']}, {which}")
    if found["rule"]:
        lines += [f"  {found['rule']}", f"  because: {found['because']}"]
    if found["answer"]:
        lines.append(f"  {found['answer']['status']} {found['answer']['body'].strip()}")
    elif not found["migratable"]:
        lines.append("  if its worker dies, it fails loudly")
    known = [f"  {name}: {json.dumps(value)}" for name, value in found["worker"].items() if value is not None]
    asked = found["worker"]["url"] is not None
    lines += ["", "judged for this worker:" if asked else "no worker was asked; judged for a stock one:"]
    lines += [*known, *(f"  - {one}" for one in found["depends"])]
    if found["lacks"]:
        lines.append(f"  it lacks what is asked for ({found['lacks']}); while another worker has it, that one is asked")
    if found["migratable"] and not found["answer"]:
        after = f"if its worker died after {found['after']} token{'' if found['after'] == 1 else 's'}, "
        lines += ["", after + (found["instead"] or "another one would get")]
    if found["continuation"]:
        sent = found["continuation"]
        body = msgspec.json.decode(sent["body"])
        lines.append(f"  {sent['method']} {sent['path']}")
        lines += [f"  {line}" for line in _pretty(body)]
        lines += [f"  - {one}" for one in found["stand_ins"]]
        lines += ["and that worker"] + [f"  - {one}" for one in found["needs"]]
    return "\n".join(lines)


def _pretty(body: dict[str, Any]) -> list[str]:
    """One field a line, long values shortened."""
    rows = [f"  {json.dumps(name)}: {json.dumps(_short(value), ensure_ascii=False)}" for name, value in body.items()]
    return ["{", *(f"{row}," for row in rows[:-1]), *rows[-1:], "}"]


def _short(value: Any) -> Any:
    if isinstance(value, list) and len(value) > _LONG:
        half = _LONG // 2
        return [*map(_short, value[:half]), f"... {len(value) - 2 * half} more ...", *map(_short, value[-half:])]
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        return f"{value[:_LONG_TEXT]}... {len(value) - _LONG_TEXT} more characters"
    return value


async def _ask(format: Format, url: str, config: Config) -> Traits:
    try:
        origin = Origin.parse(url)
    except ValueError as exc:
        raise ValueError(f"worker: {exc}") from None
    key = config.worker_api_key
    headers: Headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
    async with open_network() as network, trio.open_nursery() as nursery:
        gateways = Gateways(network, connect_timeout=config.connect_timeout_secs)
        await nursery.start(gateways.run)
        pool = Pool(network, connect_timeout=config.connect_timeout_secs, grpc=gateways.dial)
        try:
            answers = {path: await _info(pool, origin, path, headers) for path in format.info_paths}
        finally:
            pool.close()
        nursery.cancel_scope.cancel()
    problem = next((f"{path} {answer}" for path, answer in answers.items() if isinstance(answer, str)), "")
    if problem:
        raise Unanswered(f"worker: {origin}{problem}")
    traits = format.traits({path: answer for path, answer in answers.items() if isinstance(answer, bytes)})
    if traits == UNKNOWN:
        raise Unanswered(f"worker: {origin} says nothing that tells what it is")
    return traits


async def _info(pool: Pool, origin: Origin, path: str, headers: Headers) -> bytes | str:
    """The answer of an info endpoint, or what is wrong with it."""
    try:
        answer = await fetch(pool, origin, "GET", path, headers=headers, timeout=INFO_TIMEOUT)
    except trio.TooSlowError:
        return f"took more than {INFO_TIMEOUT:g} s"
    except (ConnectFailed, ConnectionBroken, BadResponse) as exc:
        return f"cannot be read: {exc}"
    if answer.status == 200:
        return answer.body
    return f"gave {answer.status}" + ("; see DYN_WORKER_API_KEY" if answer.status in (401, 403) else "")
