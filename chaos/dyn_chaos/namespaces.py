"""Network namespaces: a worker in one of its own, joined to this machine by a pair of devices that can lose packets.

Nothing of the machine's own network is touched: the rules that drop packets are inside the namespace, and go with it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from subprocess import CalledProcessError

import trio

#: In the namespace: its own table, with a chain for each way; rules are added and flushed.
_TABLE = "inet dyn_chaos"
_WAYS = ("input", "output")
#: Shares are told to nft as so many of a million.
_MILLION = 1_000_000


class Unable(Exception):
    """This machine cannot do it; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace."""

    name: str
    #: The worker's address in it; this machine's at the other end of the link.
    address: str
    gateway: str

    @property
    def enter(self) -> tuple[str, ...]:
        """What comes before the command line of a process that shall run in it."""
        return ("ip", "netns", "exec", self.name)

    async def drop(self, share: float) -> None:
        """Lose this share of the packets that come and of those that go."""
        some = "" if share == 1 else f"numgen random mod {_MILLION} < {round(share * _MILLION)} "
        for way in _WAYS:
            await self._nft(f"add rule {_TABLE} {way} iifname != lo oifname != lo {some}counter drop")

    async def heal(self) -> None:
        """Lose nothing any more."""
        for way in _WAYS:
            await self._nft(f"flush chain {_TABLE} {way}")

    async def dropped(self) -> int:
        """Packets lost since `drop`."""
        listed = json.loads(await self._nft("list ruleset", "-j"))["nftables"]
        expressions = [each for entry in listed if "rule" in entry for each in entry["rule"]["expr"]]
        return sum(each["counter"]["packets"] for each in expressions if "counter" in each)

    async def _nft(self, command: str, *flags: str) -> str:
        return await _run([*self.enter, "nft", *flags, command])

    async def make(self) -> None:
        """Make it. Raises `Unable`."""
        outside, inside = f"{self.name}h", f"{self.name}w"
        try:
            await _run(["ip", "netns", "add", self.name])
            await _ip(f"link add {outside} type veth peer name {inside} netns {self.name}")
            await _ip(f"address add {self.gateway}/30 dev {outside}")
            await _ip(f"link set {outside} up")
            await _ip(f"-n {self.name} address add {self.address}/30 dev {inside}")
            await _ip(f"-n {self.name} link set {inside} up")
            await _ip(f"-n {self.name} link set lo up")
            await self._nft(f"add table {_TABLE}")
            for way in _WAYS:
                await self._nft(f"add chain {_TABLE} {way} {{ type filter hook {way} priority 0; }}")
        except CalledProcessError as error:
            said = (error.stderr or b"").decode("utf-8", "replace").strip()
            raise Unable(f"`{' '.join(error.cmd)}` failed: {said}") from None

    async def remove(self) -> None:
        """Remove it and the link, at once: a namespace alone takes its devices away only some time later."""
        for what in (["link", "delete", f"{self.name}h"], ["netns", "delete", self.name]):
            await trio.run_process(["ip", *what], check=False, capture_stderr=True)


@asynccontextmanager
async def namespaces(count: int) -> AsyncIterator[list[Namespace]]:
    """So many; gone at the end of the block. Raises `Unable`."""
    if os.geteuid() != 0:
        raise Unable("network namespaces need root")
    missing = [program for program in ("ip", "nft") if shutil.which(program) is None]
    if missing:
        raise Unable(f"no {' and no '.join(missing)} on the PATH (packages iproute2, nftables)")
    pid = os.getpid()
    made = [
        # Of the private 10/8; another run of this has another process id.
        Namespace(f"dyn{pid}-{number}", f"{base}.{4 * number + 2}", f"{base}.{4 * number + 1}")
        for number in range(count)
        for base in [f"10.{200 + pid // 250 % 50}.{pid % 250 + 1}"]
    ]
    try:
        for namespace in made:
            await namespace.make()
        yield made
    finally:
        with trio.CancelScope(shield=True):
            for namespace in made:
                await namespace.remove()


async def _ip(arguments: str) -> None:
    await _run(["ip", *arguments.split()])


async def _run(argv: Sequence[str]) -> str:
    done = await trio.run_process(list(argv), capture_stdout=True, capture_stderr=True)
    return bytes(done.stdout).decode()
