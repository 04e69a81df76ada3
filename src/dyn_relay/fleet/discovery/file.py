"""The workers of a file: one URL a line, empty lines and lines that begin with `#` aside.

The file is small, so its content is compared, not its times: a network file system's clock may be another one, and a
file that is replaced within one tick has the old time. Files are written in pieces; content counts once it has stayed
the same for a moment. A file that is replaced by renaming another one over it is never seen half-written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from dyn_relay.fleet.discovery.base import Report, Source, SourceError
from dyn_relay.http11.origin import Origin

#: Seconds that new content must stay the same.
SETTLE = 1.0
#: Seconds that one look may take: a file system over a network can hang for ever.
TIMEOUT = 10.0


class WatchedFile(Source):
    """`path` is looked at every `interval` seconds. `read` gives its content; raises `OSError`."""

    name = "file"

    def __init__(self, path: str, interval: float, read: Callable[[str], Awaitable[bytes]] | None = None) -> None:
        self._path = path
        self._interval = interval
        self._read = read or _in_thread()

    async def run(self, report: Report) -> None:
        taken: bytes | None = None
        while True:
            content = await self._look()
            while content != taken:
                before = content
                await trio.sleep(SETTLE)
                content = await self._look()
                if content == before:
                    report(parse(content, self._path))
                    taken = content
            await trio.sleep(self._interval)

    async def _look(self) -> bytes:
        try:
            with trio.fail_after(TIMEOUT):
                return await self._read(self._path)
        except OSError as exc:
            raise SourceError(f"{self._path}: {exc.strerror or exc}") from exc
        except trio.TooSlowError:
            raise SourceError(f"{self._path}: reading took more than {TIMEOUT:g} s") from None


def parse(content: bytes, path: str) -> list[Origin]:
    """The workers that the content names. Raises `SourceError` that names the line; a file that names nobody is one.

    An empty file is what a writer leaves that died, or that has just begun.
    """
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as exc:
        number = content.count(b"\n", 0, exc.start) + 1
        raise SourceError(f"{path}: line {number}: is not UTF-8") from None
    origins = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                origins.append(Origin.parse(line))
            except ValueError as exc:
                raise SourceError(f"{path}: line {number}: {exc}") from None
    if not origins:
        raise SourceError(f"{path}: names no worker, so it is not believed")
    return origins


def _in_thread() -> Callable[[str], Awaitable[bytes]]:
    # One thread at most, so that a look that hangs cannot use up those that resolve names.
    limiter = trio.CapacityLimiter(1)

    async def read(path: str) -> bytes:
        return await trio.to_thread.run_sync(Path(path).read_bytes, abandon_on_cancel=True, limiter=limiter)

    return read
