"""A headless Chromium, driven by its DevTools protocol over two pipes: JSON texts, each with a zero byte after it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from trio.lowlevel import FdStream

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe", "about:blank"),
)


def find() -> str | None:
    """The program; None if there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Failed(Exception):
    """The browser said no, or the page's script raised."""


class Page:
    """One page. What it logs, raises and asks the network for is kept."""

    def __init__(self, to_browser: FdStream) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._to_browser = to_browser
        self._session: str | None = None
        self._replies: dict[int, dict[str, Any]] = {}
        self._arrived: dict[int, trio.Event] = {}
        self._loaded = trio.Event()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; its result."""
        number = len(self._arrived)
        arrived = self._arrived[number] = trio.Event()
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._to_browser.send_all(json.dumps(message).encode() + b"\0")
        await arrived.wait()
        reply = self._replies.pop(number)
        if "error" in reply:
            raise Failed(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result

    async def attach(self) -> None:
        """To the page that the browser has begun with; listen to all that is told of it."""
        targets = (await self.call("Target.getTargets"))["targetInfos"]
        [page] = [target["targetId"] for target in targets if target["type"] == "page"]
        self._session = (await self.call("Target.attachToTarget", targetId=page, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window, and which colours its user prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        """Go there; return once it has loaded."""
        self._loaded = trio.Event()
        await self.call("Page.navigate", url=url)
        await self._loaded.wait()

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, awaited."""
        said = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise Failed(f"{expression}: {said['exceptionDetails']}")
        return said["result"].get("value")

    async def listen(self, from_browser: FdStream) -> None:
        """Take all that the browser says, until it ends."""
        rest = b""
        async for data in from_browser:
            *messages, rest = (rest + data).split(b"\0")
            for message in messages:
                self._hear(json.loads(message))

    def _hear(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case None:
                self._replies[message["id"]] = message
                self._arrived[message["id"]].set()
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])


@asynccontextmanager
async def browse(program: str, profile: Path) -> AsyncIterator[Page]:
    """A browser with one page; `profile` is a folder for what it writes. It and its children end with the block."""
    process, to_browser, from_browser = _start(program, profile)
    try:
        async with to_browser, from_browser, trio.open_nursery() as nursery:
            page = Page(to_browser)
            nursery.start_soon(page.listen, from_browser)
            await page.attach()
            yield page
            nursery.cancel_scope.cancel()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start(program: str, profile: Path) -> tuple[subprocess.Popen[bytes], FdStream, FdStream]:
    """The browser, a stream to it and one from it. It reads from descriptor 3 and writes to 4; bash puts ours there."""
    its_input, to_browser = os.pipe()
    from_browser, its_output = os.pipe()
    moved = ("bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "bash")
    process = subprocess.Popen(
        [*moved, program, f"--user-data-dir={profile}", *FLAGS],
        pass_fds=(its_input, its_output),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(its_input)
    os.close(its_output)
    return process, FdStream(to_browser), FdStream(from_browser)
