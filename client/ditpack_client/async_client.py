"""``AsyncClient``: ``Client`` for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

from ditpack_client import wire
from ditpack_client.address import Protocol, parse_address
from ditpack_client.call import (
    CONTROL_MODEL,
    CONTROL_TIMEOUT,
    DEFAULT_CONCURRENCY,
    DEFAULT_TIMEOUT,
    EDIT_MODEL,
    MODEL,
    STREAM_MODEL,
    Call,
    check_timeout,
)
from ditpack_client.errors import GenerationError, cut_short, plain_errors
from ditpack_client.events import Event, Finished
from ditpack_client.result import ImageResult
from ditpack_client.transport import AsyncGrpcTransport, AsyncHttpTransport


class AsyncClient:
    """``Client`` for asyncio. Belongs to the event loop it is first used in; cancelling a call drops its connection."""

    def __init__(
        self,
        url: str = "localhost:8000",
        protocol: Protocol | None = None,
        *,
        model: str = MODEL,
        edit_model: str = EDIT_MODEL,
        stream_model: str = STREAM_MODEL,
    ) -> None:
        self.address = parse_address(url, protocol)
        self.model, self.edit_model, self.stream_model = model, edit_model, stream_model
        self._opened: AsyncHttpTransport | AsyncGrpcTransport | None = None

    async def generate(
        self,
        prompt: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = 0,
        request_id: str | None = None,
        **settings: Unpack[wire.Settings],
    ) -> ImageResult:
        """As ``Client.generate``."""
        request: wire.ImageRequest = {"prompt": prompt, **settings}
        return await self._result(Call(request, timeout, retries, request_id))

    async def edit(
        self,
        prompt: str,
        images: wire.ImageSource | Sequence[wire.ImageSource],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = 0,
        request_id: str | None = None,
        **settings: Unpack[wire.Settings],
    ) -> ImageResult:
        """As ``Client.edit``."""
        request: wire.EditRequest = {"prompt": prompt, "images": wire.image_list(images), **settings}
        return await self._result(Call(request, timeout, retries, request_id))

    def stream(
        self,
        prompt: str,
        *,
        preview_every: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = 0,
        request_id: str | None = None,
        **settings: Unpack[wire.Settings],
    ) -> AsyncGenerator[Event, None]:
        """As ``Client.stream``. Cancelling the task that iterates drops the request too.

        ``async with contextlib.aclosing(client.stream(…)) as events`` has it dropped before the block is left;
        otherwise it is as soon as nobody holds the iterator.
        """
        request: wire.ImageRequest = {"prompt": prompt, **settings}
        return self.events(Call(request, timeout, retries, request_id, preview_every))

    async def generate_many(
        self,
        requests: Iterable[wire.ImageRequest],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = 0,
    ) -> AsyncIterator[tuple[int, ImageResult | GenerationError]]:
        """As ``Client.generate_many``; leaving the loop early cancels what is under way as well."""
        slots = asyncio.Semaphore(concurrency)

        async def one(index: int, request: wire.ImageRequest) -> tuple[int, ImageResult | GenerationError]:
            async with slots:
                try:
                    return index, await self._result(Call(request, timeout, retries, None))
                except GenerationError as error:
                    return index, error

        tasks = [asyncio.create_task(one(index, request)) for index, request in enumerate(requests)]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel(self, request_id: str, *, timeout: float = CONTROL_TIMEOUT) -> bool:
        """As ``Client.cancel``."""
        return bool((await self._control("cancel", request_id, timeout))["found"])

    async def status(self, *, timeout: float = CONTROL_TIMEOUT) -> list[dict[str, Any]]:
        """As ``Client.status``."""
        return list((await self._control("status", None, timeout))["engines"])

    async def is_ready(self, model: str | None = None, *, timeout: float = CONTROL_TIMEOUT) -> bool:
        """As ``Client.is_ready``."""
        check_timeout(timeout)
        with plain_errors(self.address.server, timeout):
            return await self._transport().is_ready(model or self.model, timeout)

    async def close(self) -> None:
        """Close what is open. The client cannot be used afterwards."""
        if self._opened is not None:
            await self._opened.close()

    async def events(self, call: Call) -> AsyncGenerator[Event, None]:
        """The events of ``call``, which are those of every try; without a stream only its end."""
        while True:
            try:
                async with aclosing(self._try(call)) as events:
                    async for event in events:
                        yield event
                return
            except GenerationError as error:
                retrying = call.retry(error)
            yield retrying
            await asyncio.sleep(retrying.seconds)

    async def _result(self, call: Call) -> ImageResult:
        async with aclosing(self.events(call)) as events:
            return await anext(event.result async for event in events if isinstance(event, Finished))

    async def _try(self, call: Call) -> AsyncGenerator[Event, None]:
        if call.preview_every is None:
            yield Finished(call.id, await self._infer(call))
            return
        inputs = wire.stream_tensors(call.request, call.preview_every)
        transport = self._transport()
        with plain_errors(self.address.server, call.timeout):
            async with aclosing(transport.stream(self.stream_model, inputs, call.left, call.id)) as answers:
                finished = False
                async for tensors in answers:
                    event = wire.decode_event(tensors, call.request, self.model, call.id)
                    finished = finished or isinstance(event, Finished)
                    if event is not None:
                        yield event
        if not finished:
            raise cut_short(self.address.server)

    async def _infer(self, call: Call) -> ImageResult:
        transport = self._transport()
        model = self.edit_model if "images" in call.request else self.model
        inputs, outputs = wire.encode(transport.protocol, call.request)
        with plain_errors(self.address.server, call.timeout):
            tensors = await transport.infer(model, inputs, outputs, call.left, call.id)
        return wire.decode(tensors, call.request, model, call.id)

    async def _control(self, action: str, request_id: str | None, timeout: float) -> dict[str, Any]:
        check_timeout(timeout)
        transport = self._transport()
        inputs, outputs = wire.encode_control(transport.protocol, action, request_id)
        with plain_errors(self.address.server, timeout):
            tensors = await transport.infer(CONTROL_MODEL, inputs, outputs, timeout, "")
        return wire.decode_control(tensors)

    def _transport(self) -> AsyncHttpTransport | AsyncGrpcTransport:
        if self._opened is None:  # aiohttp and grpc.aio want to be made inside the running loop
            over_http = self.address.protocol == "http"
            self._opened = AsyncHttpTransport(self.address) if over_http else AsyncGrpcTransport(self.address)
        return self._opened

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
