"""Four ways to carry the same tensors; each has ``protocol``, ``infer`` and ``close``."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import time
from typing import Any

import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from ditpack_client.address import Address
from ditpack_client.wire import Tensors


class HttpTransport:
    """tritonclient.http's bodies over the standard library's sockets, one connection an image.

    Its own client is bound to one thread by gevent, and every thread that uses gevent keeps two open files for good;
    an image takes seconds, a connection does not.
    """

    protocol = tritonclient.http

    def __init__(self, address: Address) -> None:
        self._address = address

    def infer(self, model: str, inputs: list[Any], outputs: list[Any], timeout: float) -> Tensors:
        ends = time.monotonic() + timeout
        client = tritonclient.http.InferenceServerClient
        body, header_length = client.generate_request_body(inputs, outputs)
        headers = {"Content-Type": "application/octet-stream"}
        if header_length is not None:
            headers["Inference-Header-Content-Length"] = str(header_length)
        connection = self._connect(timeout)
        try:
            connection.connect()
            connection.sock.settimeout(max(ends - time.monotonic(), 0.001))
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise InferenceServerException(_reason(content), status=str(response.status))
        tensors: Tensors = client.parse_response_body(
            content, header_length=response.getheader("Inference-Header-Content-Length")
        )
        return tensors

    def close(self) -> None:
        """Nothing is kept open."""

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._address.secure:
            return http.client.HTTPSConnection(
                self._address.server, timeout=timeout, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self._address.server, timeout=timeout)


class GrpcTransport:
    """tritonclient.grpc: one channel, which any number of threads may use."""

    protocol = tritonclient.grpc

    def __init__(self, address: Address) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(address.server, ssl=address.secure)

    def infer(self, model: str, inputs: list[Any], outputs: list[Any], timeout: float) -> Tensors:
        tensors: Tensors = self._client.infer(model, inputs, outputs=outputs, client_timeout=timeout)
        return tensors

    def close(self) -> None:
        self._client.close()


class AsyncHttpTransport:
    """tritonclient.http.aio. Made inside the event loop that uses it."""

    protocol = tritonclient.http

    def __init__(self, address: Address) -> None:
        # infer() bounds the whole call, so the session's own limits (60 s, 100 connections) must not cut in.
        self._client = tritonclient.http.aio.InferenceServerClient(
            address.server,
            conn_limit=0,
            conn_timeout=None,
            ssl=address.secure,
            ssl_context=ssl.create_default_context() if address.secure else False,
        )

    async def infer(self, model: str, inputs: list[Any], outputs: list[Any], timeout: float) -> Tensors:
        async with asyncio.timeout(timeout):
            tensors: Tensors = await self._client.infer(model, inputs, outputs=outputs)
        return tensors

    async def close(self) -> None:
        await self._client.close()


class AsyncGrpcTransport:
    """tritonclient.grpc.aio. Made inside the event loop that uses it."""

    protocol = tritonclient.grpc

    def __init__(self, address: Address) -> None:
        self._client = tritonclient.grpc.aio.InferenceServerClient(address.server, ssl=address.secure)

    async def infer(self, model: str, inputs: list[Any], outputs: list[Any], timeout: float) -> Tensors:
        tensors: Tensors = await self._client.infer(model, inputs, outputs=outputs, client_timeout=timeout)
        return tensors

    async def close(self) -> None:
        await self._client.close()


def _reason(content: bytes) -> str:
    """The message of an error answer: Triton's JSON, or whatever stands in front of it said."""
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace").strip()
