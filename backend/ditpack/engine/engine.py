"""The engine: one thread, three verbs. Requests join, pause and leave between steps.

``schedule`` drops who was cancelled or has waited too long and chooses who takes the next step, ``run`` takes it in one
packed forward, ``postprocess`` hands finished requests to the delivery thread. Nothing else touches the sampler or the
requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ditpack.engine.delivery import DeliveryThread
from ditpack.engine.flight import Flight
from ditpack.engine.isolation import advance
from ditpack.engine.job import Job, Progress, Result, StepStats
from ditpack.errors import DitpackError, GenerationFailed, Unavailable
from ditpack.packing.batcher import VarlenSequenceBatcher
from ditpack.sampling.sampler import Pack, Sampler

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0  # how long an idle engine sleeps before it looks around again; arrivals wake it at once
_ASKED_A_STEP = 8  # how many of those that wait are asked whether their client has gone; 0.1 ms each
_REMEMBERED_CANCELS = 1024  # ids that were cancelled before they came
_QUIET_S = 0.5  # what is accepted but not here yet, in the text encoder or Triton's queue, comes within this
_CLOSING = "the server is shutting down"


class Engine:
    """Serves jobs until closed.

    Args:
        sampler: what begins, packs, steps and finishes the requests of one model.
        token_budget: the most tokens a forward may carry; a larger request runs alone.
        max_queue_size: how many jobs may wait because the next step has no room for them; more are refused.
        on_step: called after every step on the delivery thread, for metrics.
    """

    def __init__(
        self,
        sampler: Sampler[Any, Any],
        *,
        token_budget: int,
        max_queue_size: int,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> None:
        if max_queue_size < 0:
            raise ValueError(f"max_queue_size = {max_queue_size}: must not be negative")
        self._sampler = sampler
        self._batcher = VarlenSequenceBatcher(token_budget)
        self._max_queue_size = max_queue_size
        self._on_step = on_step
        self._delivery = DeliveryThread()
        self._changed = threading.Condition()  # guards the next six; notified at every arrival, step and departure
        self._flights: list[Flight] = []  # everybody, oldest first
        self._active: list[Flight] = []  # those of them that take the current step
        self._asked_last = 0  # where in the queue the last round of questions about cancels ended
        self._cancelled: OrderedDict[str, None] = OrderedDict()  # ids to refuse when they come, oldest first
        self._closing_ns: int | None = None  # monotonic; what was accepted later is refused
        self._refusal: str | None = None  # why no new job is taken; set once, by close or by death
        self._abandon = False  # close() ran out of time: fail what is left
        self._pack: Pack | None = None  # of the active ones, if it still holds; the engine thread's own
        self._thread = threading.Thread(target=self._loop, name="ditpack-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether new jobs are taken."""
        return self._refusal is None and self._sampler.ready

    @property
    def refusal(self) -> str | None:
        """Why no new job will ever be taken again, or None."""
        return self._refusal

    @property
    def active_requests(self) -> int:
        """How many requests take part in the current step."""
        return len(self._active)

    @property
    def active_rows(self) -> int:
        """How many rows the current step has."""
        members = [flight.member for flight in tuple(self._active)]  # the engine's thread changes it
        return sum(len(member.rows) for member in members if member is not None)

    @property
    def waiting_requests(self) -> int:
        """How many requests wait for their turn, begun or not."""
        return len(self._flights) - len(self._active)

    def submit(self, job: Job) -> None:
        """Take ``job``, or refuse it at once: nobody waits here.

        Raises:
            InvalidRequest: the conditioning does not fit the model.
            Cancelled: it was cancelled by its id, or its deadline passed, before it came.
            Unavailable: the queue is full, or the engine is stopping or dead.
        """
        tokens = sum(row.tokens for row in self._sampler.rows(job.request, job.conditioning))
        flight = Flight(job, tokens)
        with self._changed:
            if self._refusal is not None:
                raise Unavailable(self._refusal)
            if self._closing_ns is not None and job.request.accepted_ns > self._closing_ns:
                raise Unavailable(_CLOSING)
            if job.request_id in self._cancelled:
                del self._cancelled[job.request_id]
                raise flight.cancelled_by_id()
            if stop := flight.passed_deadline():
                raise stop
            fits = sum(other.tokens for other in self._flights) + tokens <= self._batcher.token_budget
            waiting = self.waiting_requests
            if self._flights and not fits and waiting >= self._max_queue_size:
                raise Unavailable(
                    f"full: {waiting} requests wait, max_queue_size is {self._max_queue_size}; try again later"
                )
            self._flights.append(flight)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> bool:
        """Drop the requests of that id at the next step; whether there were any.

        An id that is not here yet is remembered, and refused when it comes: Triton's queue may still hold it.
        """
        with self._changed:
            found = [flight for flight in self._flights if flight.job.request_id == request_id]
            for flight in found:
                flight.cancelled = True
            if not found:
                self._cancelled[request_id] = None
                self._cancelled.move_to_end(request_id)
                while len(self._cancelled) > _REMEMBERED_CANCELS:
                    self._cancelled.popitem(last=False)
            self._changed.notify_all()
            return bool(found)

    def watch(
        self,
        request_id: str,
        timeout: float,
        preview_every: int = 0,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> Iterator[Progress]:
        """Where the request of that id stands, each time that changes, from its arrival to its end.

        Waits up to ``timeout`` seconds for it to arrive; ends without a word if it does not. A slow reader misses what
        came in between. ``preview_every``: have a preview made after every so many steps; 0 = none. ``is_gone``: asked
        at least every second; it ends the watch when nobody is left to read it.
        """
        until = time.monotonic() + timeout
        last: Progress | None = None
        arrived = False
        while True:
            with self._changed:
                flight = next((f for f in self._flights if f.job.request_id == request_id), None)
                if flight is None and (arrived or self._refusal is not None or time.monotonic() > until):
                    return
                progress = None
                if flight is not None:
                    arrived = True
                    flight.preview_every = preview_every
                    waiting = sorted((f for f in self._flights if f.member is None), key=lambda f: f.priority)
                    progress = flight.progress(waiting.index(flight) + 1 if flight in waiting else 0)
                if progress is None or progress == last:
                    self._changed.wait(_IDLE_WAIT_S)
            if is_gone():
                return
            if progress is None or progress == last:
                continue
            last = progress
            yield progress

    def drain(self, timeout: float) -> bool:
        """Finish what the server has accepted by now, refuse what it accepts from now on, then take nothing at all;
        whether all was answered within ``timeout`` seconds.

        Jobs that were accepted before may still be on their way here, so it waits until none came for a moment.
        """
        until = time.monotonic() + timeout
        with self._changed:
            self._closing_ns = self._closing_ns or time.monotonic_ns()
            quiet_since = time.monotonic()
            while self._refusal is None and (now := time.monotonic()) < min(until, quiet_since + _QUIET_S):
                if self._flights:
                    quiet_since = now
                self._changed.wait(_QUIET_S / 5)
        self._refuse(_CLOSING)
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive() and self._delivery.flush(until - time.monotonic())

    def close(self, timeout: float) -> None:
        """Take no new jobs, finish the accepted ones for up to ``timeout`` seconds, fail the rest, end the threads and
        the sampler.
        """
        self._refuse(_CLOSING)
        self._thread.join(timeout)
        with self._changed:
            self._abandon = True
            self._changed.notify_all()
        self._thread.join(timeout)
        self._delivery.close(timeout)
        self._sampler.close()

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
        left = self._left_by_clients()
        with self._changed:
            while True:
                if self._abandon:
                    return False
                stops = {flight: flight.stop_reason() or left.get(flight) for flight in self._flights}
                stopped = [(flight, stop) for flight, stop in stops.items() if stop]
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

    def _left_by_clients(self) -> dict[Flight, DitpackError]:
        """Those whose client has gone: all that take part in the steps, and some that wait, so that a long queue does
        not slow the steps down. Asked without the lock: arrivals need not wait for the answers.
        """
        with self._changed:
            active = set(self._active)
            asked = list(active)
            waiting = [flight for flight in self._flights if flight not in active]
        first = self._asked_last if self._asked_last < len(waiting) else 0
        self._asked_last = first + _ASKED_A_STEP
        asked += waiting[first : self._asked_last]
        return {flight: stop for flight in asked if (stop := flight.left_by_client())}

    def _begin(self, flight: Flight) -> None:
        try:
            flight.member = self._sampler.begin(flight.job.request, flight.job.conditioning)
        except Exception as error:
            self._sampler.check_device()
            self._leave(flight)
            self._answer(flight, flight.as_answer(error))
        else:
            flight.started = time.monotonic()

    def _run(self) -> None:
        """Take one step with everybody whose turn it is."""
        if not self._active:
            return
        started = time.monotonic()
        members = [flight.member for flight in self._active if flight.member is not None]
        rows, tokens = sum(len(member.rows) for member in members), sum(member.tokens for member in members)
        replays, eager = self._sampler.graph_replays, self._sampler.eager_forwards
        pack, failures = advance(self._sampler, members, self._pack)
        self._sampler.throttle()
        self._pack = pack if pack is not None and pack.steps_left else None
        for flight in self._active:
            flight.pack_sizes.append(len(members))
        for failed, error in failures:
            flight = next(flight for flight in self._active if flight.member is failed)
            self._leave(flight)
            self._answer(flight, flight.as_answer(error))
        for flight in self._active:
            flight.look_ahead(self._sampler)
        with self._changed:
            self._changed.notify_all()
        if self._on_step is not None:
            stats = StepStats(
                requests=len(members),
                rows=rows,
                tokens=tokens,
                waiting=self.waiting_requests,
                seconds=time.monotonic() - started,
                graph_replays=self._sampler.graph_replays - replays,
                eager_forwards=self._sampler.eager_forwards - eager,
                pad_tokens=0 if pack is None else pack.pad_tokens,
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
                self._answer(flight, flight.as_answer(error))
            else:
                self._deliver(flight, latents, time.monotonic())

    def _leave(self, flight: Flight) -> None:
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

    def _answer(self, flight: Flight, outcome: Result | DitpackError) -> None:
        self._delivery.put(lambda: flight.job.deliver(outcome))

    def _deliver(self, flight: Flight, latents: Callable[[], torch.Tensor], finished: float) -> None:
        sizes = flight.pack_sizes
        info = {
            "queue_ms": 1000 * (flight.started - flight.job.arrived),
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
                flight.job.deliver(flight.as_answer(error))
            else:
                flight.job.deliver(Result(result, info))

        self._delivery.put(deliver)
