"""The engine: one thread, three verbs. Requests join, pause and leave between steps.

``schedule`` drops what was cancelled and chooses who takes the next step, ``run`` takes it in one packed forward,
``postprocess`` hands finished requests to the delivery thread. Nothing else touches the sampler or the requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ditpack.engine.delivery import DeliveryThread
from ditpack.engine.isolation import advance
from ditpack.engine.job import Job, Result, StepStats
from ditpack.errors import Cancelled, DitpackError, GenerationFailed, Unavailable
from ditpack.packing.batcher import VarlenSequenceBatcher
from ditpack.sampling.sampler import Member, Pack, Sampler

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0  # how long an idle engine sleeps before it looks around again; arrivals wake it at once


@dataclass(slots=True, eq=False)
class _Flight:
    """A job inside the engine, from the waiting room to its answer."""

    job: Job
    first_tokens: int
    submitted: float
    skipped: int = 0
    started: float = 0.0
    member: Member | None = None  # set when it takes its first step
    pack_sizes: list[int] = field(default_factory=list)  # requests in each step it took

    @property
    def tokens(self) -> int:
        return self.member.tokens if self.member else self.first_tokens

    @property
    def steps(self) -> int:
        return self.job.request.num_inference_steps

    @property
    def steps_left(self) -> int:
        return self.member.steps_left if self.member else self.steps


class Engine:
    """Serves jobs until closed.

    Args:
        sampler: what begins, packs, steps and finishes the requests of one model.
        token_budget: the most tokens a forward may carry; a larger request runs alone.
        waiting_room: how many jobs may wait for a turn; ``submit`` blocks while it is full.
        on_step: called after every step on the delivery thread, for metrics.
    """

    def __init__(
        self,
        sampler: Sampler[Any, Any],
        *,
        token_budget: int,
        waiting_room: int,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> None:
        if waiting_room < 1:
            raise ValueError(f"waiting_room = {waiting_room}: must be at least 1")
        self._sampler = sampler
        self._batcher = VarlenSequenceBatcher(token_budget)
        self._waiting_room = waiting_room
        self._on_step = on_step
        self._delivery = DeliveryThread()
        self._changed = threading.Condition()  # guards the next four
        self._flights: list[_Flight] = []  # everybody, oldest first
        self._active: list[_Flight] = []  # those of them that take the current step
        self._refusal: str | None = None  # why no new job is taken; set once, by close or by death
        self._abandon = False  # close() ran out of time: fail what is left
        self._pack: Pack | None = None  # of the active ones, if it still holds; the engine thread's own
        self._thread = threading.Thread(target=self._loop, name="ditpack-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether new jobs are taken."""
        return self._refusal is None

    @property
    def active_requests(self) -> int:
        """How many requests take part in the current step."""
        return len(self._active)

    @property
    def waiting_requests(self) -> int:
        """How many requests wait for their turn, begun or not."""
        return len(self._flights) - len(self._active)

    def submit(self, job: Job, timeout: float) -> None:
        """Put ``job`` into the waiting room, waiting up to ``timeout`` seconds while it is full.

        Raises:
            InvalidRequest: the conditioning does not fit the model.
            Cancelled: its deadline passed before there was room.
            Unavailable: the room stayed full, or the engine is stopping or dead.
        """
        tokens = sum(row.tokens for row in self._sampler.rows(job.request, job.conditioning))
        flight = _Flight(job, tokens, time.monotonic())
        until = flight.submitted + timeout
        with self._changed:
            while True:
                if self._refusal is not None:
                    raise Unavailable(self._refusal)
                if stop := _passed_deadline(flight):
                    raise stop
                if self.waiting_requests < self._waiting_room:
                    break
                left = until - time.monotonic()
                if left <= 0:
                    raise Unavailable(f"full: {self._waiting_room} requests have been waiting for {timeout:g} s")
                self._changed.wait(min(left, _IDLE_WAIT_S))
            self._flights.append(flight)
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Take no new jobs, finish the accepted ones for up to ``timeout`` seconds, fail the rest, end the threads."""
        self._refuse("the server is shutting down")
        self._thread.join(timeout)
        with self._changed:
            self._abandon = True
            self._changed.notify_all()
        self._thread.join(timeout)
        self._delivery.close(timeout)

    # The engine thread.

    def _loop(self) -> None:
        try:
            self._sampler.bind_thread()
            while self._schedule():
                self._run()
                self._postprocess()
        except BaseException as error:
            logger.exception("the engine stopped")
            self._refuse(f"the engine stopped ({type(error).__name__}); the server has to be restarted")
        finally:
            reason = self._refusal or "the engine stopped"
            with self._changed:
                left, self._flights, self._active = self._flights, [], []
            for flight in left:
                self._answer(flight, Unavailable(reason))

    def _schedule(self) -> bool:
        """Drop the cancelled and choose who takes the next step; sleep while there is nobody. False: end."""
        with self._changed:
            while True:
                if self._abandon:
                    return False
                stopped = [(flight, stop) for flight in self._flights if (stop := _stop_reason(flight))]
                for flight, _ in stopped:
                    self._flights.remove(flight)
                chosen = self._batcher.select(self._flights)
                if chosen or stopped:
                    break
                if self._refusal is not None:
                    return False
                self._changed.wait(_IDLE_WAIT_S)
            if chosen != self._active:
                self._active, self._pack = chosen, None
                self._changed.notify_all()
        for flight, stop in stopped:
            self._answer(flight, stop)
        for flight in chosen:
            if flight.member is None:
                self._begin(flight)
        return True

    def _begin(self, flight: _Flight) -> None:
        try:
            flight.member = self._sampler.begin(flight.job.request, flight.job.conditioning)
        except Exception as error:
            self._sampler.check_device()
            self._leave(flight)
            self._answer(flight, _as_answer(flight, error))
        else:
            flight.started = time.monotonic()

    def _run(self) -> None:
        """Take one step with everybody whose turn it is."""
        if not self._active:
            return
        started = time.monotonic()
        members = [flight.member for flight in self._active if flight.member is not None]
        rows, tokens = sum(len(member.rows) for member in members), sum(member.tokens for member in members)
        replays = self._sampler.graph_replays
        pack, failures = advance(self._sampler, members, self._pack)
        self._sampler.throttle()
        self._pack = pack if pack is not None and pack.steps_left else None
        for flight in self._active:
            flight.pack_sizes.append(len(members))
        for failed, error in failures:
            flight = next(flight for flight in self._active if flight.member is failed)
            self._leave(flight)
            self._answer(flight, _as_answer(flight, error))
        if self._on_step is not None:
            stats = StepStats(
                requests=len(members),
                rows=rows,
                tokens=tokens,
                waiting=self.waiting_requests,
                seconds=time.monotonic() - started,
                graph_replays=self._sampler.graph_replays - replays,
            )
            on_step = self._on_step
            self._delivery.put(lambda: on_step(stats))

    def _postprocess(self) -> None:
        """Hand the finished to the delivery thread."""
        for flight in tuple(self._active):
            if flight.member is None or flight.member.steps_left:
                continue
            self._leave(flight)
            try:
                latents = self._sampler.finish(flight.member)
            except Exception as error:
                self._sampler.check_device()
                self._answer(flight, _as_answer(flight, error))
            else:
                self._deliver(flight, latents, time.monotonic())

    def _leave(self, flight: _Flight) -> None:
        with self._changed:
            self._flights.remove(flight)
            self._active.remove(flight)
            self._pack = None
            self._changed.notify_all()

    # Answers.

    def _refuse(self, reason: str) -> None:
        with self._changed:
            self._refusal = self._refusal or reason
            self._changed.notify_all()

    def _answer(self, flight: _Flight, outcome: Result | DitpackError) -> None:
        self._delivery.put(lambda: flight.job.deliver(outcome))

    def _deliver(self, flight: _Flight, latents: Callable[[], torch.Tensor], finished: float) -> None:
        sizes = flight.pack_sizes
        info = {
            "queue_ms": 1000 * (flight.started - flight.submitted),
            "denoise_ms": 1000 * (finished - flight.started),
            "steps": len(sizes),
            "pack": {
                "requests_max": max(sizes),
                "requests_mean": sum(sizes) / len(sizes),
                "shared_steps": sum(size > 1 for size in sizes),
            },
        }

        def deliver() -> None:
            try:
                result = latents()
                if not torch.isfinite(result).all():
                    raise GenerationFailed("the result is not finite (overflow in the model)")
            except Exception as error:
                flight.job.deliver(_as_answer(flight, error))
            else:
                flight.job.deliver(Result(result, info))

        self._delivery.put(deliver)


def _as_answer(flight: _Flight, error: Exception) -> DitpackError:
    """``error`` as the client may see it; what is unexpected goes to the log, not to the client."""
    if isinstance(error, DitpackError):
        return error
    logger.error("request %s failed", flight.job.request_id, exc_info=error)
    return GenerationFailed(f"generation failed ({type(error).__name__}); the server's log has the details")


def _stop_reason(flight: _Flight) -> DitpackError | None:
    """Why ``flight`` should not go on, or None. Asked by the engine's thread alone."""
    if passed := _passed_deadline(flight):
        return passed
    try:
        cancelled = flight.job.is_cancelled()
    except Exception as error:
        return _as_answer(flight, error)
    return Cancelled(f"cancelled by the client after {_progress(flight)}") if cancelled else None


def _passed_deadline(flight: _Flight) -> Cancelled | None:
    if not flight.job.request.expired:
        return None
    return Cancelled(f"DEADLINE_MS = {flight.job.request.deadline_ms}: the deadline passed after {_progress(flight)}")


def _progress(flight: _Flight) -> str:
    return f"{flight.steps - flight.steps_left} of {flight.steps} steps"
