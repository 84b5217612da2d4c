"""One image that a client asks for: what the blocking and the asyncio client do alike."""

from __future__ import annotations

import random
import time
import uuid

from ditpack_client import wire
from ditpack_client.errors import GenerationError
from ditpack_client.events import Retrying

MODEL = "qwen_image"
EDIT_MODEL = "qwen_image_edit"
STREAM_MODEL = "qwen_image_stream"
CONTROL_MODEL = "control"
DEFAULT_TIMEOUT = 300.0
DEFAULT_CONCURRENCY = 16
CONTROL_TIMEOUT = 10.0  # seconds; for what needs no engine
_FIRST_S = 2.0  # the longest that the first retry is put off
_LONGEST_S = 30.0


class Call:
    """A request, its id, the time that is left for it and the retries that are left.

    ``preview_every`` None asks for the image alone, in one answer; otherwise for a stream of events.

    Raises:
        ValueError: when ``timeout`` is not above 0, or ``retries`` or ``preview_every`` below 0.
    """

    def __init__(
        self,
        request: wire.ImageRequest,
        timeout: float,
        retries: int,
        request_id: str | None,
        preview_every: int | None = None,
    ) -> None:
        check_timeout(timeout)
        if retries < 0 or (preview_every or 0) < 0:
            raise ValueError(f"retries = {retries}, preview_every = {preview_every}: must not be below 0")
        self.request = request
        self.timeout = timeout
        self.preview_every = preview_every
        # Unguessable: whoever knows it may cancel the request.
        self.id = request_id or uuid.uuid4().hex
        self._ends = time.monotonic() + timeout
        self._retries = retries
        self._tries = 0

    @property
    def left(self) -> float:
        """Seconds until its time is up, at least a millisecond."""
        return max(self._ends - time.monotonic(), 0.001)

    def retry(self, error: GenerationError) -> Retrying:
        """How long to wait before it is sent again; the waits double, and vary so that clients do not come in step.

        Raises:
            GenerationError: ``error``, where sending it again cannot help, or the retries or the time are used up.
        """
        error.request_id = self.id
        seconds = min(_FIRST_S * 2**self._tries, _LONGEST_S) * random.uniform(0.5, 1.0)
        if error.code != "UNAVAILABLE" or self._tries >= self._retries or seconds >= self._ends - time.monotonic():
            raise error
        self._tries += 1
        return Retrying(self.id, seconds, error.message)


def check_timeout(timeout: float) -> None:
    if not timeout > 0:
        raise ValueError(f"timeout = {timeout}: must be above 0 seconds")
