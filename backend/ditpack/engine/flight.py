"""One job on its way through the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ditpack.engine.job import Job, Progress
from ditpack.errors import Cancelled, DeadlinePassed, DitpackError, GenerationFailed, Unavailable
from ditpack.sampling.sampler import Member, Sampler

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Flight:
    """A job inside the engine, from its arrival to its answer."""

    job: Job
    first_tokens: int
    skipped: int = 0
    cancelled: bool = False  # by its id
    started: float = 0.0
    member: Member | None = None  # set when it takes its first step
    pack_sizes: list[int] = field(default_factory=list)  # requests in each step it took
    preview_every: int = 0  # steps; 0: nobody watches
    preview: tuple[int, Callable[[], Tensor]] | None = None  # as in Progress

    @property
    def tokens(self) -> int:
        return self.member.tokens if self.member else self.first_tokens

    @property
    def steps(self) -> int:
        return self.job.request.num_inference_steps

    @property
    def priority(self) -> int:
        return self.job.request.priority

    @property
    def steps_left(self) -> int:
        return self.member.steps_left if self.member else self.steps

    @property
    def steps_done(self) -> int:
        return self.steps - self.steps_left

    def progress(self, position: int) -> Progress:
        """Where it stands; ``position`` as in ``Progress``."""
        seconds = time.monotonic() - self.started if self.steps_done else 0.0
        return Progress(self.steps_done, self.steps, position, seconds, self.preview)

    def look_ahead(self, sampler: Sampler[Any, Any]) -> None:
        """Have a preview made, on the device and in its own time, if somebody wants one after this step."""
        if self.member is None or not self.preview_every or self.steps_done % self.preview_every or not self.steps_left:
            return
        try:
            self.preview = (self.steps_done, sampler.preview(self.member))
        except Exception as error:  # a picture less, not a request less
            self.preview_every = 0
            logger.warning("request %s: no previews", self.job.request_id, exc_info=error)

    def stop_reason(self) -> DitpackError | None:
        """Why it should not go on, as far as is known here, or None."""
        if passed := self.passed_deadline():
            return passed
        if self.cancelled:
            return self.cancelled_by_id()
        waited = time.monotonic() - self.job.arrived
        if self.member is None and waited > self.job.timeout_s:
            return Unavailable(f"timeout: no step taken in {waited:.1f} s, {self.job.timeout_s:g} s are allowed")
        return None

    def left_by_client(self) -> DitpackError | None:
        """``Cancelled`` if the client has gone. A question to Triton, about 0.1 ms; the engine's thread alone asks."""
        try:
            cancelled = self.job.is_cancelled()
        except Exception as error:
            return self.as_answer(error)
        return Cancelled(f"cancelled by the client after {self._so_far}") if cancelled else None

    def cancelled_by_id(self) -> Cancelled:
        return Cancelled(f"cancelled by its id after {self._so_far}")

    def passed_deadline(self) -> Cancelled | None:
        if not self.job.request.expired:
            return None
        return DeadlinePassed(f"DEADLINE_MS = {self.job.request.deadline_ms}: the deadline passed after {self._so_far}")

    def as_answer(self, error: Exception) -> DitpackError:
        """``error`` as the client may see it; what is unexpected goes to the log, not to the client."""
        if isinstance(error, DitpackError):
            return error
        logger.error("request %s failed", self.job.request_id, exc_info=error)
        return GenerationFailed(f"generation failed ({type(error).__name__}); the server's log has the details")

    @property
    def _so_far(self) -> str:
        return f"{self.steps_done} of {self.steps} steps"
