"""What can go wrong, said once and plainly, whichever protocol carried it."""

from __future__ import annotations

import errno
import http.client
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from tritonclient.utils import InferenceServerException

_HTTP_CODES = {"400": "INVALID_ARG", "404": "NOT_FOUND", "499": "CANCELLED", "501": "UNSUPPORTED", "503": "UNAVAILABLE"}
_GRPC_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "CANCELLED": "CANCELLED",
    "UNIMPLEMENTED": "UNSUPPORTED",
    "UNAVAILABLE": "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "TIMEOUT",
}
# Triton's HTTP front end answers 400 for CANCELLED as well, and the errors of its streams have no code at all: only the
# words tell them apart.
_CANCELLED_WORDS = re.compile(r"cancelled by |DEADLINE_MS = \d+: the deadline passed")
_STREAM_WORDS = {
    "CANCELLED": _CANCELLED_WORDS,
    "NOT_FOUND": re.compile(r"Request for unknown model"),
    "INVALID_ARG": re.compile(r"[A-Z_]+ = |expected number of inputs|unexpected |inference input "),
    "UNAVAILABLE": re.compile(
        r"full: |timeout: |.*(shutting down|engine stopped|maximum queue size|timeout expired|is not ready)", re.I
    ),
}
_TRITON_PREFIX = re.compile(r"^(in ensemble '[^']*', |\[request id: [^\]]*\] )+")
_NO_CONNECTION = re.compile(r"failed to connect|errors resolving|(dns|name) resolution", re.IGNORECASE)
# Triton's HTTP port closes a connection that begins in HTTP/2; others answer in HTTP/1.
_NOT_GRPC = re.compile(r"failed to connect.*(socket closed|http1|http/2)|http1\.x server", re.IGNORECASE | re.DOTALL)


class GenerationError(Exception):
    """An image was not made.

    Attributes:
        code: INVALID_ARG (the request is wrong; do not send it again), UNAVAILABLE (no server, or it is full or
            stopping; a retry may help), CANCELLED (cancelled, or its own deadline passed), TIMEOUT (no answer within
            the client's ``timeout``), NOT_FOUND (no such model), WITHHELD (made, and kept back by a filter in the
            ensemble), UNSUPPORTED or INTERNAL.
        message: one plain sentence.
        request_id: the id that the request was sent with; None where none was sent.
    """

    request_id: str | None = None

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@contextmanager
def plain_errors(server: str, timeout: float) -> Iterator[None]:
    """Turn whatever a transport raises inside the block into a ``GenerationError``. ``server`` is "host:port"."""
    try:
        yield
    except InferenceServerException as error:
        raise _from_triton(error, server, timeout) from None
    except TimeoutError:
        raise _timed_out(server, timeout) from None
    except (OSError, http.client.HTTPException, aiohttp.ClientError) as error:
        raise _from_connection(error, server) from None


def cut_short(server: str) -> GenerationError:
    """For a stream that ends properly, but without its image."""
    return GenerationError("INTERNAL", f"the stream of {server} ended without an image")


def _from_triton(error: InferenceServerException, server: str, timeout: float) -> GenerationError:
    status = str(error.status() or "").removeprefix("StatusCode.")
    message = _TRITON_PREFIX.sub("", str(error.message() or "").strip()) or "the server gave no reason"
    code = _HTTP_CODES.get(status) or _GRPC_CODES.get(status) or "INTERNAL"
    if code == "TIMEOUT":
        return _timed_out(server, timeout)
    if code == "UNAVAILABLE" and _NOT_GRPC.search(message):
        return _wrong_protocol(server, "gRPC", "HTTP")
    if code == "UNAVAILABLE" and _NO_CONNECTION.search(message):
        return _no_server(server)
    if code == "UNAVAILABLE" and message == "Socket closed":
        return _hung_up(server)
    if status == "400" and _CANCELLED_WORDS.match(message):
        code = "CANCELLED"
    if not status:
        code = next((code for code, words in _STREAM_WORDS.items() if words.match(message)), "INTERNAL")
    return GenerationError(code, message)


def _from_connection(error: Exception, server: str) -> GenerationError:
    number = getattr(error, "errno", None)
    hung_up = http.client.RemoteDisconnected | aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError
    if number in (errno.ECONNRESET, errno.EPIPE) or isinstance(error, hung_up | http.client.IncompleteRead):
        return _hung_up(server)
    if isinstance(error, http.client.HTTPException | aiohttp.ClientResponseError):
        return _wrong_protocol(server, "HTTP", "gRPC")
    if isinstance(error, ssl.SSLError | aiohttp.ClientSSLError):
        return GenerationError("UNAVAILABLE", f"no TLS connection to {server}: {error}")
    unreachable = number in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
    if unreachable or isinstance(error, socket.gaierror | aiohttp.ClientConnectorError):
        return _no_server(server)
    return GenerationError("UNAVAILABLE", f"the connection to {server} failed: {error}")


def _no_server(server: str) -> GenerationError:
    return GenerationError("UNAVAILABLE", f"no server at {server}: start one with `ditpack serve`")


def _hung_up(server: str) -> GenerationError:
    return GenerationError("UNAVAILABLE", f"the server at {server} closed the connection before it answered")


def _wrong_protocol(server: str, wanted: str, other: str) -> GenerationError:
    return GenerationError("UNAVAILABLE", f"the server at {server} does not speak {wanted}: is that its {other} port?")


def _timed_out(server: str, timeout: float) -> GenerationError:
    return GenerationError("TIMEOUT", f"no answer from {server} within {timeout:g} s")
