"""Cancels by id, and what watchers see of a request on its way through the engine."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import TIMEOUT, Hooked, Ticket, engine, request, start, tiny_sampler

from ditpack.engine.job import Progress, Result
from ditpack.errors import Cancelled
from ditpack.sampling.qwen_image import QwenImageSampler


@pytest.fixture(scope="module")
def sampler(tiny_checkpoint: Path) -> QwenImageSampler:
    return tiny_sampler(tiny_checkpoint)


class Gate:
    """A sampler that takes one step each time it is let."""

    def __init__(self, sampler: QwenImageSampler) -> None:
        self._steps = threading.Semaphore(0)
        self.sampler = Hooked(sampler, step=lambda pack: self._steps.acquire(timeout=TIMEOUT))

    def let(self, steps: int = 1) -> None:
        self._steps.release(steps)


def test_a_cancel_leaves_within_one_step_and_neighbours_do_not_change_by_a_bit(sampler: QwenImageSampler) -> None:
    alone = engine(sampler)
    expected = Ticket(request(seed=2, num_inference_steps=6))
    alone.submit(expected.job)
    latents = expected.latents()
    alone.close(TIMEOUT)

    gate = Gate(sampler)
    served = engine(gate.sampler)
    gone, stays = Ticket(request(seed=1, num_inference_steps=6)), Ticket(request(seed=2, num_inference_steps=6))
    served.submit(gone.job)
    served.submit(stays.job)
    gate.let(2)
    assert served.cancel("seed-1")
    gate.let()
    outcome = gone.outcome()
    assert isinstance(outcome, Cancelled)
    assert not stays.outcomes
    gate.let(20)
    assert torch.equal(stays.latents(), latents)
    served.close(TIMEOUT)
    assert len(gone.outcomes) == len(stays.outcomes) == 1


def test_an_id_that_comes_later_is_refused_once(sampler: QwenImageSampler) -> None:
    served = engine(sampler)
    assert not served.cancel("seed-1")
    with pytest.raises(Cancelled, match="cancelled by its id after 0 of 4 steps"):
        served.submit(Ticket(request(seed=1)).job)
    again = Ticket(request(seed=1))
    served.submit(again.job)
    assert isinstance(again.outcome(), Result), "the cancel was meant for the one before"
    served.close(TIMEOUT)


def test_a_cancelled_id_may_be_used_again(sampler: QwenImageSampler) -> None:
    gate = Gate(sampler)
    served = engine(gate.sampler)
    first, second = Ticket(request(seed=1)), Ticket(request(seed=1))
    served.submit(first.job)
    assert served.cancel("seed-1")
    gate.let()
    assert isinstance(first.outcome(), Cancelled)
    served.submit(second.job)
    gate.let(20)
    assert isinstance(second.outcome(), Result)
    served.close(TIMEOUT)


def test_one_that_waits_is_cancelled_too(sampler: QwenImageSampler) -> None:
    gate = Gate(sampler)
    served = engine(gate.sampler, token_budget=1)
    running, waiting = (Ticket(request(seed=seed)) for seed in (1, 2))
    start(served, running)
    served.submit(waiting.job)
    assert served.cancel("seed-2")
    gate.let()
    outcome = waiting.outcome()
    assert isinstance(outcome, Cancelled)
    assert "cancelled by its id after 0 of 4 steps" in str(outcome)
    gate.let(100)
    assert isinstance(running.outcome(), Result)
    served.close(TIMEOUT)


def test_positions_count_those_of_higher_priority_first(sampler: QwenImageSampler) -> None:
    gate = Gate(sampler)
    served = engine(gate.sampler, token_budget=1)
    start(served, Ticket(request(seed=1)))
    for seed, priority in ((2, 3), (3, 2), (4, 1), (5, 2)):
        served.submit(Ticket(request(seed=seed, priority=priority)).job)
    positions = {seed: next(served.watch(f"seed-{seed}", TIMEOUT)).position for seed in (1, 2, 3, 4, 5)}
    assert positions == {1: 0, 4: 1, 3: 2, 5: 3, 2: 4}
    gate.let(100)
    served.close(TIMEOUT)


def test_remembered_ids_are_bounded(sampler: QwenImageSampler) -> None:
    served = engine(sampler)
    for index in range(3000):
        served.cancel(f"id {index}")
    assert len(served._cancelled) <= 1024
    served.close(TIMEOUT)


def test_watchers_see_positions_then_steps(sampler: QwenImageSampler) -> None:
    gate = Gate(sampler)
    served = engine(gate.sampler, token_budget=1)
    seen: list[Progress] = []
    watcher = threading.Thread(target=lambda: seen.extend(served.watch("seed-3", TIMEOUT)))
    watcher.start()
    for seed in (1, 2, 3):
        served.submit(Ticket(request(seed=seed, num_inference_steps=2)).job)
    for _ in range(12):
        gate.let()
        time.sleep(0.05)
    watcher.join(TIMEOUT)
    assert not watcher.is_alive()
    positions = [each.position for each in seen if each.step == 0 and each.position]
    assert positions == sorted(positions, reverse=True)
    assert positions[-1] == 1
    assert seen[-1].step in (1, 2), "once the last step is taken, the answer may come before the watcher looks"
    assert all(earlier != later for earlier, later in itertools.pairwise(seen))
    served.close(TIMEOUT)


def test_a_watch_of_nobody_ends(sampler: QwenImageSampler) -> None:
    served = engine(sampler)
    assert list(served.watch("nobody", 0.0)) == []
    assert list(served.watch("nobody", TIMEOUT, is_gone=lambda: True)) == []
    threading.Timer(0.1, served.close, (TIMEOUT,)).start()
    assert list(served.watch("nobody", TIMEOUT)) == []


def test_previews_come_at_the_steps_asked_for_and_change_nothing(sampler: QwenImageSampler) -> None:
    def latents(every: int) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        gate = Gate(sampler)
        served = engine(gate.sampler)
        ticket = Ticket(request(seed=5, num_inference_steps=7))
        previews: dict[int, torch.Tensor] = {}

        def watch() -> None:
            for progress in served.watch("seed-5", TIMEOUT, every):
                if progress.preview is not None:
                    previews[progress.preview[0]] = progress.preview[1]()

        watcher = threading.Thread(target=watch)
        watcher.start()
        served.submit(ticket.job)
        for _ in range(7):
            time.sleep(0.05)
            gate.let()
        result = ticket.latents()
        watcher.join(TIMEOUT)
        served.close(TIMEOUT)
        return result, previews

    plain, none = latents(0)
    watched, previews = latents(3)
    assert none == {}
    assert set(previews) == {3, 6}
    assert torch.equal(plain, watched)
    assert all(each.shape == plain.shape for each in previews.values())
    assert (previews[6] - plain).norm() < (previews[3] - plain).norm(), "the guess gets better"


def test_a_preview_that_raises_costs_the_request_nothing(sampler: QwenImageSampler) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no room for a preview")

    served = engine(Hooked(sampler, preview=broken))
    ticket = Ticket(request(seed=5, num_inference_steps=30))
    watcher = threading.Thread(target=lambda: list(served.watch("seed-5", TIMEOUT, 1)))
    watcher.start()
    served.submit(ticket.job)
    assert isinstance(ticket.outcome(), Result)
    watcher.join(TIMEOUT)
    served.close(TIMEOUT)
