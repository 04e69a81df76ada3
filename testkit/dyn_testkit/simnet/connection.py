"""One end of a connection in memory."""

from __future__ import annotations

import trio

from dyn_relay.net import RECEIVE_SIZE, ConnectionBroken
from dyn_testkit.simnet.events import Trace
from dyn_testkit.simnet.lane import Lane
from dyn_testkit.simnet.pipe import Pipe, Signal

#: Host and port.
Address = tuple[str, int]


class SimConnection:
    """One end of a connection; `dyn_relay.net.Connection` says what its methods promise.

    As on Linux, an end that gets an RST still reads what had reached it before the error; an end that closes or aborts
    throws away what it has not read. Closing loses what `send` or `offer` could not hand over yet.
    """

    def __init__(self, incoming: Pipe, outgoing: Pipe, local: Address, peer: Address, trace: Trace | None) -> None:
        #: The names of the hosts, this side's and the other's.
        self.host, self.peer_host = local[0], peer[0]
        #: As `host:port`, likewise.
        self.local = f"{local[0]}:{local[1]}"
        self.peer = f"{peer[0]}:{peer[1]}"
        #: What this end writes into.
        self.outgoing = outgoing
        self._in = incoming
        self._unsent = b""
        self._closed = False
        self._shut = False
        self._trace = trace
        #: None once both are closed: that leaves no cycle to the garbage collector.
        self._other: SimConnection | None = None

    @classmethod
    def pair(
        cls, there: Lane, back: Lane, local: Address, peer: Address, trace: Trace | None
    ) -> tuple[SimConnection, SimConnection]:
        """Both ends of a new connection: `local`'s, which writes into `there`, and `peer`'s."""
        out, into = Pipe(there), Pipe(back)
        near, far = cls(into, out, local, peer, trace), cls(out, into, peer, local, trace)
        near._other, far._other = far, near
        there.ends[near] = back.ends[far] = None
        return near, far

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        await trio.lowlevel.checkpoint()
        pipe = self._in
        while True:
            pipe.settle()
            if pipe.data and not self._closed:
                data = pipe.get(max_bytes)
                if self._trace is not None:
                    self._trace("received", self.peer, self.local, len(data))
                return data
            self._check()
            if pipe.ended:
                if self._trace is not None:
                    self._trace("eof", self.peer, self.local)
                return b""
            await pipe.readable.wait(pipe.due)

    async def send(self, data: bytes) -> None:
        self._unsent += data
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._unsent:
            self._in.settle()
            self._check()
            if self._shut or self._in.gone:
                raise ConnectionBroken("Broken pipe")
            self._flush()
            if self._unsent:
                await self.outgoing.writable.wait(self._in.due)
        await trio.lowlevel.cancel_shielded_checkpoint()

    def offer(self, data: bytes) -> bool:
        self._in.settle()
        if self._unsent or self._closed or self._shut or self._in.gone or self.outgoing.room <= 0:
            return False
        self._unsent = data
        self._flush()
        return True

    def _flush(self) -> None:
        count = self.outgoing.put(memoryview(self._unsent))
        self._unsent = self._unsent[count:]
        if count and self._trace is not None:
            self._trace("sent", self.local, self.peer, count)

    def _check(self) -> None:
        if self._closed:
            raise ConnectionBroken("the connection is closed")
        if self._in.broken:
            raise ConnectionBroken("Connection reset by peer")

    @property
    def pending(self) -> bool:
        return bool(self._unsent)

    async def wait_closed(self) -> None:
        await trio.lowlevel.checkpoint()
        self._in.settle()
        while not (self._in.ended or self._closed):
            await self._in.readable.wait(self._in.due)
            self._in.settle()

    def quiet(self) -> bool:
        self._in.settle()
        return not (self._closed or self._in.data or self._in.ended)

    def end_sending(self) -> None:
        if not (self._closed or self._shut):
            self._shut = True
            self._signal(Signal.END)
            if self._trace is not None:
                self._trace("shut", self.local, self.peer)

    def close(self) -> None:
        if not self._closed:
            # What the peer still writes finds nobody: as with TCP, it learns so by a reset.
            self._leave(Signal.GONE)
            if self._trace is not None:
                self._trace("closed", self.local, self.peer)

    def abort(self) -> None:
        if not self._closed:
            self._leave(Signal.RESET)
            if self._trace is not None:
                self._trace("reset", self.local, self.peer)

    def reset(self) -> bool:
        """Break the connection at both ends, now; False if both know already that it is over."""
        pipes = (self._in, self.outgoing)
        for pipe in pipes:
            pipe.settle()
        other = self._other
        if other is None or ((self._closed or self._in.broken) and (other._closed or self.outgoing.broken)):
            return False
        for pipe in pipes:
            pipe.reset()
        if self._trace is not None:
            self._trace("reset", self.local, self.peer)
        return True

    def resend(self) -> None:
        """The lane of what this end writes was cut or healed."""
        self.outgoing.resend()
        self._in.writable.ring()  # whoever sends at the other end looks again when this end's RST arrives

    def _leave(self, how: Signal) -> None:
        self._closed = True
        self._signal(how)
        self._in.discard()
        if self._other is not None and self._other._closed:
            for end in (self, self._other):
                del end.outgoing.lane.ends[end]
                end._other = None

    def _signal(self, what: Signal) -> None:
        self.outgoing.signal(what)
        self.outgoing.writable.ring()  # whoever sends at this end
