"""``Client`` and ``AsyncClient``: a prompt in, or images and a prompt, a picture out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Self, Unpack

from ditpack_client import wire
from ditpack_client.address import Protocol, parse_address
from ditpack_client.errors import GenerationError, plain_errors
from ditpack_client.result import ImageResult
from ditpack_client.transport import AsyncGrpcTransport, AsyncHttpTransport, GrpcTransport, HttpTransport

DEFAULT_TIMEOUT = 300.0
DEFAULT_CONCURRENCY = 16
MODEL = "qwen_image"
EDIT_MODEL = "qwen_image_edit"


class Client:
    """Asks one server for images. May be used by several threads at once.

    ``url`` is "localhost:8000", "http://host:8000", "https://host", "grpc://host:8001" or "grpcs://host"; without a
    scheme ``protocol`` decides ("http" when it is None too). ``model`` makes images from text, ``edit_model`` edits.

    Raises:
        ValueError: when ``url`` is no address or contradicts ``protocol``.
    """

    def __init__(
        self,
        url: str = "localhost:8000",
        protocol: Protocol | None = None,
        *,
        model: str = MODEL,
        edit_model: str = EDIT_MODEL,
    ) -> None:
        self.address = parse_address(url, protocol)
        self.model, self.edit_model = model, edit_model
        self._transport: HttpTransport | GrpcTransport = (
            HttpTransport(self.address) if self.address.protocol == "http" else GrpcTransport(self.address)
        )

    def generate(
        self, prompt: str, *, timeout: float = DEFAULT_TIMEOUT, **settings: Unpack[wire.Settings]
    ) -> ImageResult:
        """Make one image.

        Args:
            prompt: what to paint.
            timeout: seconds to wait for the answer.
            **settings: ``negative_prompt``, ``width`` and ``height`` (pixels, multiples of 16),
                ``num_inference_steps``, ``true_cfg_scale`` (1 = no guidance), ``seed``, ``output_format`` ("png",
                "jpeg", "webp" or "raw"), ``deadline_ms`` (the server drops the request after it). The server fills
                in what is left out.

        Raises:
            GenerationError: see its ``code`` and ``message``.
            TypeError: for a setting that does not exist.
            ValueError: when ``timeout`` is not above 0.
        """
        request: wire.ImageRequest = {"prompt": prompt, **settings}
        return self._send(request, timeout)

    def edit(
        self,
        prompt: str,
        images: wire.ImageSource | Sequence[wire.ImageSource],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        **settings: Unpack[wire.Settings],
    ) -> ImageResult:
        """Make one image from one or, where the served checkpoint takes so many, up to three others.

        Args:
            prompt: what to do to them.
            images: encoded images (PNG, JPEG or WebP), names of such files, or PIL images.
            timeout, **settings: as for ``generate``. Without ``width`` and ``height`` the result has the aspect of the
                last image.

        Raises:
            GenerationError, TypeError, ValueError: as ``generate``; NOT_FOUND when the served checkpoint cannot edit.
        """
        request: wire.EditRequest = {"prompt": prompt, "images": _images(images), **settings}
        return self._send(request, timeout)

    def generate_many(
        self,
        requests: Iterable[wire.ImageRequest],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Iterator[tuple[int, ImageResult | GenerationError]]:
        """Make many images, up to ``concurrency`` at a time, and yield each as it ends. Those with images are edits.

        Yields (position in ``requests``, result or error); one failure does not stop the others. ``timeout`` is for
        each. Leaving the loop early drops what was not sent yet.

        Raises:
            TypeError: for a setting that does not exist.
        """
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="ditpack-client")
        try:
            places = {pool.submit(self._send, request, timeout): index for index, request in enumerate(requests)}
            for future in as_completed(places):  # bounded: each call ends by its own timeout
                error = future.exception()
                if error is not None and not isinstance(error, GenerationError):
                    raise error
                yield places[future], error if error is not None else future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Close what is open. The client cannot be used afterwards."""
        self._transport.close()

    def _send(self, request: wire.ImageRequest, timeout: float) -> ImageResult:
        _check_timeout(timeout)
        model = self.edit_model if "images" in request else self.model
        inputs, outputs = wire.encode(self._transport.protocol, request)
        with plain_errors(self.address.server, timeout):
            tensors = self._transport.infer(model, inputs, outputs, timeout)
        return wire.decode(tensors, request, model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """``Client`` for asyncio. Belongs to the event loop it is first used in; cancelling a call drops its connection."""

    def __init__(
        self,
        url: str = "localhost:8000",
        protocol: Protocol | None = None,
        *,
        model: str = MODEL,
        edit_model: str = EDIT_MODEL,
    ) -> None:
        self.address = parse_address(url, protocol)
        self.model, self.edit_model = model, edit_model
        self._opened: AsyncHttpTransport | AsyncGrpcTransport | None = None

    async def generate(
        self, prompt: str, *, timeout: float = DEFAULT_TIMEOUT, **settings: Unpack[wire.Settings]
    ) -> ImageResult:
        """As ``Client.generate``."""
        request: wire.ImageRequest = {"prompt": prompt, **settings}
        return await self._send(request, timeout)

    async def edit(
        self,
        prompt: str,
        images: wire.ImageSource | Sequence[wire.ImageSource],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        **settings: Unpack[wire.Settings],
    ) -> ImageResult:
        """As ``Client.edit``."""
        request: wire.EditRequest = {"prompt": prompt, "images": _images(images), **settings}
        return await self._send(request, timeout)

    async def generate_many(
        self,
        requests: Iterable[wire.ImageRequest],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> AsyncIterator[tuple[int, ImageResult | GenerationError]]:
        """As ``Client.generate_many``; leaving the loop early cancels what is under way as well."""
        slots = asyncio.Semaphore(concurrency)

        async def one(index: int, request: wire.ImageRequest) -> tuple[int, ImageResult | GenerationError]:
            async with slots:
                try:
                    return index, await self._send(request, timeout)
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

    async def close(self) -> None:
        """Close what is open. The client cannot be used afterwards."""
        if self._opened is not None:
            await self._opened.close()

    async def _send(self, request: wire.ImageRequest, timeout: float) -> ImageResult:
        _check_timeout(timeout)
        transport = self._transport()
        model = self.edit_model if "images" in request else self.model
        inputs, outputs = wire.encode(transport.protocol, request)
        with plain_errors(self.address.server, timeout):
            tensors = await transport.infer(model, inputs, outputs, timeout)
        return wire.decode(tensors, request, model)

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


def _images(images: wire.ImageSource | Sequence[wire.ImageSource]) -> Sequence[wire.ImageSource]:
    return [images] if isinstance(images, wire.ImageSource) else images


def _check_timeout(timeout: float) -> None:
    if not timeout > 0:
        raise ValueError(f"timeout = {timeout}: must be above 0 seconds")
