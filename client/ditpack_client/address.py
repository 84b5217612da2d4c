"""Where the server is, and which protocol it is spoken to in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

Protocol = Literal["http", "grpc"]
_SCHEMES: dict[str, tuple[Protocol, bool]] = {
    "http": ("http", False),
    "https": ("http", True),
    "grpc": ("grpc", False),
    "grpcs": ("grpc", True),
}
_DEFAULT_PORT = {"http": 8000, "grpc": 8001}


@dataclass(frozen=True, slots=True)
class Address:
    """``server`` is "host:port"; ``secure`` asks for TLS."""

    server: str
    protocol: Protocol
    secure: bool


def parse_address(url: str, protocol: Protocol | None) -> Address:
    """Read "localhost:8000", "http://host:8000", "https://host", "grpc://host:8001" or "grpcs://host".

    ``protocol`` None takes the scheme's, and HTTP where there is no scheme.

    Raises:
        ValueError: when ``url`` is no such address or its scheme contradicts ``protocol``.
    """
    if protocol not in (None, "http", "grpc"):
        raise ValueError(f"protocol {protocol!r} is neither 'http' nor 'grpc'")
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = protocol or "http", url
    if scheme not in _SCHEMES:
        raise ValueError(f"{url!r} has the scheme {scheme!r}; known are {', '.join(_SCHEMES)}")
    spoken, secure = _SCHEMES[scheme]
    if protocol is not None and protocol != spoken:
        raise ValueError(f"{url!r} contradicts the protocol {protocol!r}")
    parts = urlsplit(f"//{rest}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is no server address: {error}") from None
    if not host or parts.username is not None or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no server address; write it like localhost:8000 or grpc://host:8001")
    shown = f"[{host}]" if ":" in host else host
    return Address(f"{shown}:{port or _DEFAULT_PORT[spoken]}", spoken, secure)
