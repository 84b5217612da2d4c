"""``Client``: a prompt in, or images and a prompt, a picture out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
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
from ditpack_client.transport import GrpcTransport, HttpTransport


class Client:
    """Asks one server for images. May be used by several threads at once.

    ``url`` is "localhost:8000", "http://host:8000", "https://host", "grpc://host:8001" or "grpcs://host"; without a
    scheme ``protocol`` decides ("http" when it is None too). ``model`` makes images from text, ``edit_model`` edits,
    ``stream_model`` makes images from text with events.

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
        stream_model: str = STREAM_MODEL,
    ) -> None:
        self.address = parse_address(url, protocol)
        self.model, self.edit_model, self.stream_model = model, edit_model, stream_model
        self._transport: HttpTransport | GrpcTransport = (
            HttpTransport(self.address) if self.address.protocol == "http" else GrpcTransport(self.address)
        )

    def generate(
        self,
        prompt: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = 0,
        request_id: str | None = None,
        **settings: Unpack[wire.Settings],
    ) -> ImageResult:
        """Make one image.

        Args:
            prompt: what to paint.
            timeout: seconds to wait for the answer, retries included.
            retries: how often to send it again, after longer and longer waits, when the answer is UNAVAILABLE. Other
                errors are final.
            request_id: what ``cancel`` takes: at least 16 characters that nobody can guess. Made when left out.
            **settings: ``negative_prompt``, ``width`` and ``height`` (pixels, multiples of 16),
                ``num_inference_steps``, ``true_cfg_scale`` (1 = no guidance), ``seed``, ``output_format`` ("png",
                "jpeg", "webp" or "raw"), ``deadline_ms`` (the server drops the request after it), ``priority`` (1
                goes before 2, 2 before 3). The server fills in what is left out.

        Raises:
            GenerationError: see its ``code`` and ``message``.
            TypeError: for a setting that does not exist.
            ValueError: when ``timeout`` is not above 0 or ``retries`` below 0.
        """
        request: wire.ImageRequest = {"prompt": prompt, **settings}
        return self._result(Call(request, timeout, retries, request_id))

    def edit(
        self,
        prompt: str,
        images: wire.ImageSource | Sequence[wire.ImageSource],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = 0,
        request_id: str | None = None,
        **settings: Unpack[wire.Settings],
    ) -> ImageResult:
        """Make one image from one or, where the served checkpoint takes so many, up to three others.

        Args:
            prompt: what to do to them.
            images: encoded images (PNG, JPEG or WebP), names of such files, or PIL images.
            timeout, retries, request_id, **settings: as for ``generate``. Without ``width`` and ``height`` the result
                has the aspect of the last image.

        Raises:
            GenerationError, TypeError, ValueError: as ``generate``; NOT_FOUND when the served checkpoint cannot edit.
        """
        request: wire.EditRequest = {"prompt": prompt, "images": wire.image_list(images), **settings}
        return self._result(Call(request, timeout, retries, request_id))

    def stream(
        self,
        prompt: str,
        *,
        preview_every: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = 0,
        request_id: str | None = None,
        **settings: Unpack[wire.Settings],
    ) -> Iterator[Event]:
        """Make one image and tell how it goes: ``Queued``, ``Step`` and ``Preview`` events, ``Finished`` at the end.

        Leaving the loop early closes the connection, and with it the server drops the request.

        Args:
            prompt, timeout, retries, request_id, **settings: as for ``generate``; "raw" cannot be streamed. Before
                each retry there is a ``Retrying``.
            preview_every: n: a small preview after every n-th step; 0: none.

        Raises:
            GenerationError, TypeError, ValueError: as ``generate``; NOT_FOUND when the server has no streams.
        """
        request: wire.ImageRequest = {"prompt": prompt, **settings}
        return self._events(Call(request, timeout, retries, request_id, preview_every))

    def generate_many(
        self,
        requests: Iterable[wire.ImageRequest],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = 0,
    ) -> Iterator[tuple[int, ImageResult | GenerationError]]:
        """Make many images, up to ``concurrency`` at a time, and yield each as it ends. Those with images are edits.

        Yields (position in ``requests``, result or error); one failure does not stop the others. ``timeout`` and
        ``retries`` are for each. Leaving the loop early drops what was not sent yet.

        Raises:
            TypeError: for a setting that does not exist.
        """

        def one(request: wire.ImageRequest) -> ImageResult:
            return self._result(Call(request, timeout, retries, None))

        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="ditpack-client")
        try:
            places = {pool.submit(one, request): index for index, request in enumerate(requests)}
            for future in as_completed(places):  # bounded: each call ends by its own timeout
                error = future.exception()
                if error is not None and not isinstance(error, GenerationError):
                    raise error
                yield places[future], error if error is not None else future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def cancel(self, request_id: str, *, timeout: float = CONTROL_TIMEOUT) -> bool:
        """Have the server drop the request with this id. It then ends with CANCELLED.

        Returns:
            Whether it was there. If not, it has ended, or the server refuses it should it still arrive.

        Raises:
            GenerationError: INVALID_ARG for an id that others could guess; NOT_FOUND when the server cannot cancel.
        """
        return bool(self._control("cancel", request_id, timeout)["found"])

    def status(self, *, timeout: float = CONTROL_TIMEOUT) -> list[dict[str, Any]]:
        """The engines of the server: ``name``, ``healthy``, ``active`` and ``waiting`` (requests) of each.

        Raises:
            GenerationError: NOT_FOUND when the server cannot tell.
        """
        return list(self._control("status", None, timeout)["engines"])

    def is_ready(self, model: str | None = None, *, timeout: float = CONTROL_TIMEOUT) -> bool:
        """Whether the server has ``model`` (None: the one that makes images from text) and would serve it now.

        Raises:
            GenerationError: when there is no answer.
        """
        check_timeout(timeout)
        with plain_errors(self.address.server, timeout):
            return self._transport.is_ready(model or self.model, timeout)

    def close(self) -> None:
        """Close what is open. The client cannot be used afterwards."""
        self._transport.close()

    def _result(self, call: Call) -> ImageResult:
        return next(event.result for event in self._events(call) if isinstance(event, Finished))

    def _events(self, call: Call) -> Iterator[Event]:
        """The events of ``call``, which are those of every try; without a stream only its end."""
        while True:
            try:
                yield from self._try(call)
                return
            except GenerationError as error:
                retrying = call.retry(error)
            yield retrying
            time.sleep(retrying.seconds)

    def _try(self, call: Call) -> Iterator[Event]:
        if call.preview_every is None:
            yield Finished(call.id, self._infer(call))
            return
        inputs = wire.stream_tensors(call.request, call.preview_every)
        with (
            plain_errors(self.address.server, call.timeout),
            closing(self._transport.stream(self.stream_model, inputs, call.left, call.id)) as answers,
        ):
            finished = False
            for tensors in answers:
                event = wire.decode_event(tensors, call.request, self.model, call.id)
                finished = finished or isinstance(event, Finished)
                if event is not None:
                    yield event
        if not finished:
            raise cut_short(self.address.server)

    def _infer(self, call: Call) -> ImageResult:
        model = self.edit_model if "images" in call.request else self.model
        inputs, outputs = wire.encode(self._transport.protocol, call.request)
        with plain_errors(self.address.server, call.timeout):
            tensors = self._transport.infer(model, inputs, outputs, call.left, call.id)
        return wire.decode(tensors, call.request, model, call.id)

    def _control(self, action: str, request_id: str | None, timeout: float) -> dict[str, Any]:
        check_timeout(timeout)
        inputs, outputs = wire.encode_control(self._transport.protocol, action, request_id)
        with plain_errors(self.address.server, timeout):
            tensors = self._transport.infer(CONTROL_MODEL, inputs, outputs, timeout, "")
        return wire.decode_control(tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
