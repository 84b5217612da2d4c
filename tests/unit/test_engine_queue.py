"""The engine's queue: how many may wait, for how long, and in which order."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from engine_tools import TIMEOUT, Hooked, Ticket, conditioning, engine, request, start, tiny_sampler

from ditpack.engine.job import Result
from ditpack.errors import Cancelled, Unavailable
from ditpack.sampling.qwen_image import Pack, QwenImageSampler


@pytest.fixture(scope="module")
def sampler(tiny_checkpoint: Path) -> QwenImageSampler:
    return tiny_sampler(tiny_checkpoint)


def test_a_full_queue_refuses_at_once(sampler: QwenImageSampler) -> None:
    gate = threading.Event()
    served = engine(Hooked(sampler, step=lambda _: gate.wait(TIMEOUT)), token_budget=1, max_queue_size=1)
    first, second, third = (Ticket(request(seed=seed)) for seed in range(3))
    start(served, first)
    served.submit(second.job)
    with pytest.raises(Unavailable, match="full: 1 requests wait, max_queue_size is 1; try again later"):
        served.submit(third.job)
    gate.set()
    for ticket in (first, second):
        assert isinstance(ticket.outcome(), Result)
    served.submit(third.job)
    assert isinstance(third.outcome(), Result)
    served.close(TIMEOUT)


def test_without_a_queue_what_fits_the_next_step_is_still_taken(sampler: QwenImageSampler) -> None:
    """Fail fast: nobody waits, and nobody is refused for whom there is room."""
    gate = threading.Event()
    tokens = sum(row.tokens for row in sampler.rows(request(), conditioning(request())))
    served = engine(Hooked(sampler, step=lambda _: gate.wait(TIMEOUT)), token_budget=3 * tokens, max_queue_size=0)
    tickets = [Ticket(request(seed=seed)) for seed in range(3)]
    for ticket in tickets:
        served.submit(ticket.job)
    with pytest.raises(Unavailable, match="full: "):
        served.submit(Ticket(request(seed=3)).job)
    gate.set()
    assert all(isinstance(ticket.outcome(), Result) for ticket in tickets)
    large = Ticket(request(width=128, height=128))
    served.submit(large.job)  # more than the whole budget, alone
    assert isinstance(large.outcome(), Result)
    served.close(TIMEOUT)


def test_who_waits_too_long_for_a_first_step_is_told(sampler: QwenImageSampler) -> None:
    served = engine(Hooked(sampler, step=lambda _: time.sleep(0.02)), token_budget=1)
    first = Ticket(request(num_inference_steps=30), timeout_s=0.1)  # once it has begun there is no limit any more
    second = Ticket(request(seed=8, num_inference_steps=50), timeout_s=0.1)
    start(served, first)
    served.submit(second.job)
    outcome = second.outcome()
    assert isinstance(outcome, Unavailable)
    assert re.fullmatch(r"timeout: no step taken in \d\.\d s, 0\.1 s are allowed", str(outcome))
    assert isinstance(first.outcome(), Result)
    served.close(TIMEOUT)


def test_priorities_count_at_every_step(sampler: QwenImageSampler) -> None:
    """Also against one that has begun, though it has the least work left."""
    order: list[int] = []
    gate = threading.Semaphore(0)

    def step(pack: Pack) -> None:
        order.extend(member.request.seed for member in pack.members)
        assert gate.acquire(timeout=TIMEOUT)

    served = engine(Hooked(sampler, step=step), token_budget=1)
    low = Ticket(request(seed=3, num_inference_steps=2, priority=3))
    usual = Ticket(request(seed=2, num_inference_steps=3, priority=2))
    high = Ticket(request(seed=1, num_inference_steps=4, priority=1))
    start(served, low)
    served.submit(usual.job)
    served.submit(high.job)
    gate.release(100)
    for ticket in (low, usual, high):
        assert isinstance(ticket.outcome(), Result)
    assert order == [3, 1, 1, 1, 1, 2, 2, 2, 3]
    served.close(TIMEOUT)


def test_a_long_queue_is_asked_for_cancels_in_turns(sampler: QwenImageSampler) -> None:
    """A question costs Triton 0.1 ms: a step asks a few of those that wait, and after some steps all were asked."""
    asked: list[int] = []
    before_steps: list[int] = []
    gone = threading.Event()

    def ask(seed: int) -> bool:
        asked.append(seed)
        return gone.is_set()

    first = Ticket(request(seed=100, num_inference_steps=20))
    waiting = [Ticket(request(seed=seed, num_inference_steps=50)) for seed in range(40)]
    hooked = Hooked(sampler, step=lambda _: before_steps.append(len(asked)))
    served = engine(hooked, token_budget=1, max_queue_size=100)
    with served._changed:  # nobody takes a step until all are here
        for ticket in (first, *waiting):
            seed = ticket.job.request.seed
            served.submit(
                ticket.job if ticket is first else dataclasses.replace(ticket.job, is_cancelled=partial(ask, seed))
            )
    assert isinstance(first.outcome(), Result)
    assert set(asked) == set(range(40))
    gone.set()
    assert all(isinstance(ticket.outcome(), Cancelled) for ticket in waiting)
    served.close(TIMEOUT)
    assert max(later - earlier for earlier, later in itertools.pairwise(before_steps)) <= 8 + 1
