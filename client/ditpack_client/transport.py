"""Four ways to carry the same tensors; each has ``protocol``, ``infer``, ``stream``, ``is_ready`` and ``close``.

Every call is bounded by its ``timeout`` in seconds, all that it does included. A stream that is closed early closes its
connection, which cancels the request on the server.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any

import aiohttp
import grpc
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from ditpack_client import sse
from ditpack_client.address import Address
from ditpack_client.wire import Inputs, Tensors, protocol_inputs

Stream = Generator[Tensors, None, None]
AsyncStream = AsyncGenerator[Tensors, None]

_CHUNK = 65536  # bytes read at a time
_JSON = {"Content-Type": "application/json"}
_UNLIMITED = [("grpc.max_receive_message_length", -1)]  # as tritonclient's own channel
# Without it the errors of a gRPC stream are words, and have no code. Of Triton 24.08; older ones ignore it.
_CODES_IN_STREAMS = {"triton_grpc_error": "true"}


class HttpTransport:
    """tritonclient.http's bodies over the standard library's sockets, one connection an image.

    Its own client is bound to one thread by gevent, and every thread that uses gevent keeps two open files for good;
    an image takes seconds, a connection does not.
    """

    protocol = tritonclient.http

    def __init__(self, address: Address) -> None:
        self._address = address

    def infer(self, model: str, inputs: list[Any], outputs: list[Any], timeout: float, request_id: str) -> Tensors:
        client = tritonclient.http.InferenceServerClient
        body, header_length = client.generate_request_body(inputs, outputs, request_id)
        headers = {"Content-Type": "application/octet-stream"}
        if header_length is not None:
            headers["Inference-Header-Content-Length"] = str(header_length)
        with _Exchange(self._address, timeout) as exchange:
            response = exchange.request("POST", f"/v2/models/{model}/infer", body, headers)
            content = exchange.read_all(response)
        if response.status != 200:
            raise InferenceServerException(_reason(content), status=str(response.status))
        tensors: Tensors = client.parse_response_body(
            content, header_length=response.getheader("Inference-Header-Content-Length")
        )
        return tensors

    def stream(self, model: str, inputs: Inputs, timeout: float, request_id: str) -> Stream:
        body = sse.request_body(inputs, request_id)
        with _Exchange(self._address, timeout) as exchange:
            response = exchange.request("POST", f"/v2/models/{model}/generate_stream", body, _JSON)
            if not _is_stream(response.getheader("Content-Type")):
                raise InferenceServerException(_reason(exchange.read_all(response)), status=str(response.status))
            parser = sse.Parser()
            while received := exchange.read(response):
                yield from parser.feed(received)

    def is_ready(self, model: str, timeout: float) -> bool:
        with _Exchange(self._address, timeout) as exchange:
            response = exchange.request("GET", f"/v2/models/{model}/ready", b"", {})
            exchange.read_all(response)  # so that what does not speak HTTP is found out
            return bool(response.status == 200)

    def close(self) -> None:
        """Nothing is kept open."""


class _Exchange:
    """One request and its answer on a connection of their own, within ``timeout`` seconds together."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._ends = time.monotonic() + timeout
        if address.secure:
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.server, timeout=timeout, context=ssl.create_default_context()
            )
        else:
            self._connection = http.client.HTTPConnection(address.server, timeout=timeout)
        self._socket: Any = None
        self._response: http.client.HTTPResponse | None = None

    def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        self._connection.connect()
        self._socket = self._connection.sock  # http.client forgets it when the server will close
        self._bound()
        self._connection.request(method, path, body, headers)
        self._response = self._connection.getresponse()
        self._bound()
        return self._response

    def read(self, response: http.client.HTTPResponse) -> bytes:
        """What has arrived, when anything has; empty at the end."""
        self._bound()
        return response.read1(_CHUNK)

    def read_all(self, response: http.client.HTTPResponse) -> bytes:
        """Everything; response.read() would wait anew for each part."""
        content = b"".join(iter(lambda: self.read(response), b""))
        if response.length:  # of what was promised
            raise http.client.IncompleteRead(content, response.length)
        return content

    def _bound(self) -> None:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()


class GrpcTransport:
    """tritonclient.grpc: one channel, which any number of threads may use, and another for streams.

    Its own streams are one at a time for a client, and a cancelled one leaves a thread behind: they go to the stub.
    """

    protocol = tritonclient.grpc

    def __init__(self, address: Address) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(address.server, ssl=address.secure)
        self._channel = (
            grpc.secure_channel(address.server, grpc.ssl_channel_credentials(), _UNLIMITED)
            if address.secure
            else grpc.insecure_channel(address.server, _UNLIMITED)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def infer(self, model: str, inputs: list[Any], outputs: list[Any], timeout: float, request_id: str) -> Tensors:
        tensors: Tensors = self._client.infer(
            model, inputs, outputs=outputs, client_timeout=timeout, request_id=request_id
        )
        return tensors

    def stream(self, model: str, inputs: Inputs, timeout: float, request_id: str) -> Stream:
        message = _message(model, inputs, request_id)
        call = self._stub.ModelStreamInfer(iter([message]), metadata=tuple(_CODES_IN_STREAMS.items()), timeout=timeout)
        try:
            for response in call:
                if response.error_message:
                    raise InferenceServerException(response.error_message)
                yield tritonclient.grpc.InferResult(response.infer_response)
        except grpc.RpcError as error:
            raise InferenceServerException(error.details(), status=str(error.code())) from None
        finally:
            call.cancel()

    def is_ready(self, model: str, timeout: float) -> bool:
        return bool(self._client.is_model_ready(model, client_timeout=timeout))

    def close(self) -> None:
        self._client.close()
        self._channel.close()


def _message(model: str, inputs: Inputs, request_id: str) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, (datatype, array) in inputs.items():
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(
            serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        )
    return message


class AsyncHttpTransport:
    """tritonclient.http.aio. Made inside the event loop that uses it."""

    protocol = tritonclient.http

    def __init__(self, address: Address) -> None:
        # Each call is bounded as a whole, so the sessions' own limits (60 s, 100 connections) must not cut in.
        context = ssl.create_default_context() if address.secure else False
        self._client = tritonclient.http.aio.InferenceServerClient(
            address.server, conn_limit=0, conn_timeout=None, ssl=address.secure, ssl_context=context
        )
        self._url = f"{'https' if address.secure else 'http'}://{address.server}/v2/models"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context or True), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def infer(
        self, model: str, inputs: list[Any], outputs: list[Any], timeout: float, request_id: str
    ) -> Tensors:
        async with asyncio.timeout(timeout):
            tensors: Tensors = await self._client.infer(model, inputs, outputs=outputs, request_id=request_id)
        return tensors

    async def stream(self, model: str, inputs: Inputs, timeout: float, request_id: str) -> AsyncStream:
        # A time-out around a yield would strike in the code that uses the events, so each wait has its own.
        ends = asyncio.get_running_loop().time() + timeout
        body = sse.request_body(inputs, request_id)
        async with asyncio.timeout_at(ends):
            response = await self._session.post(f"{self._url}/{model}/generate_stream", data=body, headers=_JSON)
        try:
            if not _is_stream(response.headers.get("Content-Type")):
                async with asyncio.timeout_at(ends):
                    raise InferenceServerException(_reason(await response.read()), status=str(response.status))
            parser = sse.Parser()
            while True:
                async with asyncio.timeout_at(ends):
                    received = await response.content.readany()
                if not received:
                    break
                for tensors in parser.feed(received):
                    yield tensors
        finally:
            response.close()

    async def is_ready(self, model: str, timeout: float) -> bool:
        async with asyncio.timeout(timeout), self._session.get(f"{self._url}/{model}/ready") as response:
            return response.status == 200

    async def close(self) -> None:
        await self._client.close()
        await self._session.close()


class AsyncGrpcTransport:
    """tritonclient.grpc.aio. Made inside the event loop that uses it."""

    protocol = tritonclient.grpc

    def __init__(self, address: Address) -> None:
        self._client = tritonclient.grpc.aio.InferenceServerClient(address.server, ssl=address.secure)

    async def infer(
        self, model: str, inputs: list[Any], outputs: list[Any], timeout: float, request_id: str
    ) -> Tensors:
        tensors: Tensors = await self._client.infer(
            model, inputs, outputs=outputs, client_timeout=timeout, request_id=request_id
        )
        return tensors

    async def stream(self, model: str, inputs: Inputs, timeout: float, request_id: str) -> AsyncStream:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            tensors = protocol_inputs(self.protocol, inputs)
            yield {"model_name": model, "inputs": tensors, "request_id": request_id}

        answers = self._client.stream_infer(requests(), stream_timeout=timeout, headers=_CODES_IN_STREAMS)
        try:
            async for tensors, error in answers:
                if error is not None:
                    raise error
                yield tensors
        except grpc.RpcError as error:
            raise InferenceServerException(error.details(), status=str(error.code())) from None
        finally:
            answers.cancel()

    async def is_ready(self, model: str, timeout: float) -> bool:
        return bool(await self._client.is_model_ready(model, client_timeout=timeout))

    async def close(self) -> None:
        await self._client.close()


def _is_stream(content_type: str | None) -> bool:
    """Errors before a stream begins come as plain JSON with a status that means something."""
    return (content_type or "").startswith(sse.MEDIA_TYPE)


def _reason(content: bytes) -> str:
    """The message of an error answer: Triton's JSON, or whatever stands in front of it said."""
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace").strip()
