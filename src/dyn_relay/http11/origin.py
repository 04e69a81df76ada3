"""Where a worker is: scheme, host, port and base path."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

_DEFAULT_PORTS = {False: 80, True: 443}
#: scheme: (TLS, gRPC)
_SCHEMES = {"http": (False, False), "https": (True, False), "grpc": (False, True), "grpcs": (True, True)}


@dataclass(frozen=True, slots=True)
class Origin:
    """The base of a worker's URLs; `str(origin)` is the URL itself, without trailing slash or default port."""

    host: str
    port: int
    tls: bool = False
    #: "" or "/some/path", put before every request's path.
    prefix: str = ""
    #: It is an engine's gRPC server: HTTP is spoken with the gateway that stands before it in this process.
    grpc: bool = False

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read `http://host[:port][/prefix]`, the same with https, or `grpc://host:port`, the same with grpcs (TLS).

        Raises `ValueError` that names the problem.
        """
        if any(not 0x20 < ord(character) < 0x7F for character in url):
            raise ValueError(f"{url!r}: blanks, control characters and non-ASCII characters are not allowed")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise ValueError(f"{url!r}: {exc}") from None
        if parts.scheme not in _SCHEMES:
            raise ValueError(f"{url!r}: the scheme must be http or https, or grpc or grpcs")
        if not parts.hostname:
            raise ValueError(f"{url!r}: the host is missing")
        if "@" in parts.netloc:
            raise ValueError(
                f"{url!r}: credentials do not belong into the URL, nor does a rank (--dp-aware finds them)"
            )
        if parts.query or parts.fragment or url.endswith(("?", "#")):
            raise ValueError(f"{url!r}: a query or fragment does not belong into the URL")
        try:
            parts.hostname.encode("idna")
        except UnicodeError:
            raise ValueError(f"{url!r}: no such host can exist") from None
        if port == 0:
            raise ValueError(f"{url!r}: port 0 cannot be connected to")
        tls, grpc = _SCHEMES[parts.scheme]
        prefix = parts.path.rstrip("/")
        if grpc and (port is None or prefix):
            raise ValueError(f"{url!r}: gRPC needs a port, and has no path")
        return cls(parts.hostname, _DEFAULT_PORTS[tls] if port is None else port, tls, prefix, grpc)

    @property
    def authority(self) -> str:
        """`host[:port]` as the Host header has it: an IPv6 address in brackets, a default port left out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = not self.grpc and self.port == _DEFAULT_PORTS[self.tls]
        return host if default else f"{host}:{self.port}"

    def __str__(self) -> str:
        scheme = next(name for name, kind in _SCHEMES.items() if kind == (self.tls, self.grpc))
        return f"{scheme}://{self.authority}{self.prefix}"
