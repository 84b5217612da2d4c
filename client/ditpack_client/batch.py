"""All images of one command: asked for at once, watched, saved, and on Ctrl-C cancelled on the server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ditpack_client.async_client import AsyncClient
from ditpack_client.call import Call
from ditpack_client.errors import GenerationError
from ditpack_client.events import Finished, Preview, Retrying
from ditpack_client.naming import Naming, preview_name
from ditpack_client.progress import Board, milliseconds, retry_text
from ditpack_client.result import ImageResult
from ditpack_client.wire import ImageRequest

_CANCEL_S = 5.0  # the longest that Ctrl-C waits for the server


@dataclass
class Batch:
    """``run`` it once.

    ``previews`` is the directory for previews, one after every ``preview_every``-th step; None: none are asked for.
    """

    client: AsyncClient
    requests: list[ImageRequest]
    naming: Naming
    timeout: float
    retries: int
    metadata: bool = True
    previews: Path | None = None
    preview_every: int = 0
    errors: list[tuple[str, str]] = field(default_factory=list)  # (prompt, message) of each image that failed
    _open: dict[int, str] = field(default_factory=dict)  # images that are not done: their requests' ids

    async def run(self) -> list[tuple[str, str]]:
        """Make every image; (prompt, message) of those that failed. When it is cancelled, so are they on the server."""
        prompts = [request["prompt"] for request in self.requests]
        async with self.client:
            try:
                streams = await self.client.is_ready(self.client.stream_model, timeout=min(self.timeout, 10.0))
            except GenerationError as error:
                return [(prompt, error.message) for prompt in prompts]
            with Board(Console(), prompts) as board:
                calls = [self._call(request, streams) for request in self.requests]
                tasks = [asyncio.create_task(self._one(index, call, board)) for index, call in enumerate(calls)]
                try:
                    # Unlike gather(), wait() leaves the requests open when Ctrl-C comes, so that they can be cancelled.
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                except asyncio.CancelledError:
                    await self._cancel()
                    raise
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                for task in done:
                    task.result()
        return self.errors

    def _call(self, request: ImageRequest, streams: bool) -> Call:
        # An edit has no stream.
        preview_every = self.preview_every if streams and "images" not in request else None
        return Call(request, self.timeout, self.retries, None, preview_every)

    async def _one(self, index: int, call: Call, board: Board) -> None:
        prompt = call.request["prompt"]
        self._open[index] = call.id
        try:
            async with aclosing(self.client.events(call)) as events:
                async for event in events:
                    board.update(index, event)
                    if isinstance(event, Preview) and self.previews is not None:
                        name = preview_name(index + 1, len(self.requests), prompt, event.step)
                        (self.previews / name).write_bytes(event.data)
                    elif isinstance(event, Retrying) and not board.moves:
                        _stderr().print(f"{retry_text(event)} ({prompt[:60]})")
                    elif isinstance(event, Finished):
                        del self._open[index]
                        path = self.naming.path(index + 1, prompt, event.result.seed)
                        event.result.save(path, metadata=self.metadata)
                        board.done(index, f"{path}  {describe(event.result)}")
        except (GenerationError, OSError) as error:
            self._open.pop(index, None)
            if call.preview_every is None and getattr(error, "code", None) == "TIMEOUT":
                with suppress(GenerationError):  # a stream's end is noticed by the server; this one has nobody left
                    await self.client.cancel(call.id, timeout=_CANCEL_S)
            message = _message(error, self.naming.directory)
            self.errors.append((prompt, message))
            board.failed(index, message)

    async def _cancel(self) -> None:
        ids = list(self._open.values())
        answers = await asyncio.gather(
            *(self.client.cancel(request_id, timeout=_CANCEL_S) for request_id in ids), return_exceptions=True
        )
        text = f"cancelled on the server: {sum(answer is True for answer in answers)} of {len(ids)}"
        reason = next((answer.message for answer in answers if isinstance(answer, GenerationError)), None)
        if reason is None and False in answers:
            reason = "the others had just ended, or are refused when they reach the engine"
        _stderr().print(f"{text} ({reason})" if reason else text)


def _message(error: GenerationError | OSError, directory: Path) -> str:
    if isinstance(error, GenerationError):
        return error.message
    return f"cannot write {error.filename or directory}: {error.strerror or error}"


def _stderr() -> Console:
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def describe(result: ImageResult) -> str:
    """Size, seed and times of an image, in one line."""
    times = f"queue {milliseconds(result.queue_ms)}, denoise {milliseconds(result.denoise_ms)}"
    return f"{result.image.width}x{result.image.height}  seed {result.seed}  {result.steps} steps  {times}"
