"""The three ports, looked at before the server starts: tritonserver itself finds out only after loading every model."""

from __future__ import annotations

import errno
import os
import socket
from collections import Counter
from contextlib import ExitStack

from ditpack.tritonserver.launch.serve_error import ServeError


def take_ports(host: str, wanted: dict[str, int]) -> dict[str, int]:
    """Check that every port of ``wanted`` (flag → port) is free on ``host``; 0 becomes a free one.

    Raises:
        ServeError: naming the port and its flag.
    """
    chosen = dict(wanted)
    counts = Counter(port for port in wanted.values() if port)
    for port, count in counts.items():
        if count > 1:
            flags = " and ".join(flag for flag, value in wanted.items() if value == port)
            raise ServeError(f"{flags} are both {port}.", "Give each its own port, or 0 for any free one.")
    with ExitStack() as held:  # all at once, so that no two zeros get the same port
        for flag, port in wanted.items():
            if not 0 <= port <= 65535:
                raise ServeError(f"{flag} {port} is no port.", "Ports are 0 … 65535; 0 picks a free one.")
            listener = held.enter_context(_bound(host, port, flag))
            chosen[flag] = listener.getsockname()[1]
    return chosen


def _bound(host: str, port: int, flag: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServeError(f"--host {host}: {error.strerror}.", "Give an address of this machine.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed server's last connections don't count
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"Port {port} on {host} is in use ({flag}).", f"Stop what uses it, or choose another: {flag} PORT."
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ServeError(
                f"--host {host} is no address of this machine.", "127.0.0.1 is this machine only, 0.0.0.0 everybody."
            ) from None
        raise ServeError(
            f"{flag} {port} on {host} cannot be used: {os.strerror(error.errno or 0)}.", f"Choose another: {flag} PORT."
        ) from None
    return listener
