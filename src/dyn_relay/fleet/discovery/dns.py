"""The workers of a DNS name: one for each of its addresses, as a headless service of Kubernetes has them."""

from __future__ import annotations

import socket

import trio

from dyn_relay.fleet.discovery.base import Report, Source, SourceError
from dyn_relay.http11.origin import Origin

#: Seconds that one look-up may take.
TIMEOUT = 10.0


class ResolvedName(Source):
    """`authority` is `NAME:PORT`; it is looked up every `interval` seconds. Raises `ValueError` for a bad one."""

    name = "dns"

    def __init__(self, authority: str, interval: float) -> None:
        self._origin = Origin.parse(f"http://{authority}")
        self._interval = interval

    async def run(self, report: Report) -> None:
        while True:
            report(await self._look())
            await trio.sleep(self._interval)

    async def _look(self) -> list[Origin]:
        host, port = self._origin.host, self._origin.port
        try:
            with trio.fail_after(TIMEOUT):
                found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as exc:
            raise SourceError(f"{host}: {exc.strerror or exc}") from exc
        except trio.TooSlowError:
            raise SourceError(f"{host}: the look-up took more than {TIMEOUT:g} s") from None
        # A pod with both kinds of address is one worker, not two: a request must not be continued on the engine that
        # has just failed it.
        families = {family: [at for kind, *_, at in found if kind == family] for family, *_ in found}
        addresses = families.get(socket.AF_INET) or families.get(socket.AF_INET6, [])
        if not addresses:
            raise SourceError(f"{host}: has no address")
        return [Origin(str(address[0]), port) for address in addresses]
