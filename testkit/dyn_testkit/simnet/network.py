"""The network: its hosts, its links, and its faults."""

from __future__ import annotations

import errno
import os
import ssl
from functools import partial

import trio

from dyn_relay.net import ConnectFailed, Connection, Ended, Listener, Sink, Transform, relay_loop
from dyn_testkit.simnet.bell import Bell
from dyn_testkit.simnet.connection import Address, SimConnection
from dyn_testkit.simnet.events import Kind, Observer, Trace
from dyn_testkit.simnet.host import SimHost
from dyn_testkit.simnet.lane import Lane
from dyn_testkit.simnet.link import Link
from dyn_testkit.simnet.listener import SimListener

#: The host of whoever dials through the `SimNetwork` itself.
CLIENT = "client"
_FIRST_PORT = 40000


class SimNetwork:
    """A world of hosts. TLS is accepted and means nothing.

    It is a `Network` itself: it listens at any host, and dials from the host `client`.

    Faults may come and go at any time; to add one twice, or to remove one that is not there, does nothing, and one that
    hits nobody changes nothing for anybody. A host is known once it was named by `host`, or has listened. What is done
    to an unknown one raises `ValueError`, since it would be done to nobody: name hosts that come later with `host`.
    """

    def __init__(self, seed: int = 0, link: Link | None = None, *, observe: Observer | None = None) -> None:
        """`link`: between hosts that have no link of their own. `observe` is told of all that happens."""
        #: Successful dials, in order.
        self.dials: list[Address] = []
        self._seed = seed
        self._default = link or Link()
        self._trace = None if observe is None else Trace(observe)
        self._hosts = {CLIENT: SimHost(self, CLIENT)}
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._listeners: dict[Address, SimListener] = {}
        self._refusing: set[Address] = set()
        self._hanging: set[Address] = set()
        self._deaf: set[Address] = set()
        #: Rung when a hanging address no longer hangs.
        self._unhung = Bell()
        self._next_port = _FIRST_PORT

    def host(self, name: str) -> SimHost:
        """The network as the host of this name sees it; it need not exist yet."""
        if name not in self._hosts:
            self._hosts[name] = SimHost(self, name)
        return self._hosts[name]

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        return await self.dial(CLIENT, (host, port))

    async def listen(self, host: str, port: int) -> Listener:
        await trio.lowlevel.checkpoint()
        address = (host, port or self._port())
        if address in self._listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self.host(host)
        listener = SimListener(address, partial(self._listeners.pop, address), self._trace)
        listener.set_deaf(address in self._deaf)
        self._listeners[address] = listener
        return listener

    async def relay(self, source: Connection, sink: Sink, transform: Transform) -> Ended:
        return await relay_loop(source, sink, transform)

    @property
    def listening(self) -> frozenset[Address]:
        """The addresses at which somebody listens now, whatever was done to them."""
        return frozenset(self._listeners)

    async def dial(self, source: str, address: Address) -> SimConnection:
        """A connection from the host `source`: one way there, one way back. Raises `ConnectFailed`."""
        await trio.lowlevel.checkpoint()
        near, target = (source, self._port()), _name(address)
        there, back = self._lane(source, address[0]), self._lane(address[0], source)
        self._tell("dial", _name(near), target)
        await there.cross()
        while address in self._hanging:
            await self._unhung.wait()
            await there.cross()
        listener = None if address in self._refusing else self._listeners.get(address)
        if listener is None:
            await back.cross()
            self._tell("refused", _name(near), target)
            raise ConnectFailed(f"{target}: Connection refused")
        connection, arrived = SimConnection.pair(there, back, near, address, self._trace)
        listener.arrive(arrived)
        try:
            await back.cross()
        except trio.Cancelled:
            connection.abort()
            raise
        self.dials.append(address)
        self._tell("connected", _name(near), target)
        return connection

    def link(self, a: str, b: str, link: Link) -> None:
        """Another link between two hosts, both ways, for bytes written (and cuts of bytes read) from now on."""
        changed = [lane.relink(link) for lane in self._both(a, b)]
        if any(changed):
            self._tell("link", a, b)

    def partition(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Lose all packets between two hosts, silently, also those on their way; `one_way`: only those from a to b.

        As TCP sends them again, bytes, ends and resets arrive after `heal`; until then dials hang, and writers wait
        once the buffer is full.
        """
        self._cut(a, b, one_way, cut=True)

    def heal(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Undo `partition`, whichever way it was; `one_way`: only from a to b. What was lost is sent again now."""
        self._cut(a, b, one_way, cut=False)

    def reset(self, a: str, b: str) -> int:
        """Break all open connections between two hosts by an RST to both ends, now; says how many there were.

        Not even a partition holds it up. What is on its way is lost; what has arrived can still be read.
        """
        lanes = self._both(a, b)
        return sum(end.reset() for lane in lanes for end in lane.ends)

    def refuse(self, address: Address) -> None:
        """Refuse dials, though somebody listens, until `accept`. No longer hangs."""
        self._check(address[0])
        if address not in self._refusing:
            self._refusing.add(address)
            self._unhang(address)
            self._tell("refuse", "", _name(address))

    def hang(self, address: Address) -> None:
        """Let dials hang, as behind a firewall that drops packets, until `accept`. No longer refuses."""
        self._check(address[0])
        if address not in self._hanging:
            self._hanging.add(address)
            self._refusing.discard(address)
            self._tell("hang", "", _name(address))

    def accept(self, address: Address) -> None:
        """Undo `refuse` and `hang`; dials that hang go on."""
        self._check(address[0])
        if address in self._refusing or address in self._hanging:
            self._refusing.discard(address)
            self._unhang(address)
            self._tell("accept", "", _name(address))

    def deafen(self, address: Address) -> None:
        """Let dials succeed, though the listener gets none of the connections until `hear`: its process hangs."""
        self._set_deaf(address, "deafen", True)

    def hear(self, address: Address) -> None:
        """Undo `deafen`: the listener gets the connections that have waited."""
        self._set_deaf(address, "hear", False)

    def _cut(self, a: str, b: str, one_way: bool, *, cut: bool) -> None:
        ways = ((a, b),) if one_way or a == b else ((a, b), (b, a))
        lanes = self._both(a, b)
        for (source, target), lane in zip(ways, lanes, strict=False):
            if lane.set_cut(cut):
                self._tell("partition" if cut else "heal", source, target)

    def _unhang(self, address: Address) -> None:
        if address in self._hanging:
            self._hanging.remove(address)
            self._unhung.ring()

    def _set_deaf(self, address: Address, kind: Kind, deaf: bool) -> None:
        self._check(address[0])
        if (address in self._deaf) is not deaf:
            (self._deaf.add if deaf else self._deaf.remove)(address)
            if address in self._listeners:
                self._listeners[address].set_deaf(deaf)
            self._tell(kind, "", _name(address))

    def _both(self, a: str, b: str) -> tuple[Lane, Lane]:
        self._check(a)
        self._check(b)
        return self._lane(a, b), self._lane(b, a)

    def _lane(self, source: str, target: str) -> Lane:
        lane = self._lanes.get((source, target))
        if lane is None:
            lane = self._lanes[source, target] = Lane(self._seed, source, target, self._default)
        return lane

    def _check(self, host: str) -> None:
        if host not in self._hosts:
            raise ValueError(f"no host {host!r}; there are {', '.join(sorted(self._hosts))} (`host` names a later one)")

    def _port(self) -> int:
        self._next_port += 1
        return self._next_port

    def _tell(self, kind: Kind, source: str, target: str) -> None:
        if self._trace is not None:
            self._trace(kind, source, target)


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
