"""The engine: shared steps, joining and leaving, bounded waits. Failures are in test_engine_faults."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from engine_tools import TIMEOUT, Hooked, Ticket, conditioning, engine, has_seed, request, run, tiny_sampler
from oracle import relative_error

from ditpack.engine.job import Result, StepStats
from ditpack.errors import Cancelled, GenerationFailed, InvalidRequest, Unavailable
from ditpack.models.graphs import bucket_for
from ditpack.packing.layout import Row
from ditpack.request import ImageRequest
from ditpack.sampling.qwen_image import Conditioning, Pack, QwenImageSampler


@pytest.fixture(scope="module")
def sampler(tiny_checkpoint: Path) -> QwenImageSampler:
    return tiny_sampler(tiny_checkpoint)


def mixed(count: int = 8) -> list[ImageRequest]:
    sizes = [(64, 64), (32, 96), (96, 32), (48, 80), (64, 64), (112, 64)]
    return [
        request(
            seed=i,
            prompt="an apple " * (i % 5 + 1),
            width=sizes[i % 6][0],
            height=sizes[i % 6][1],
            num_inference_steps=4 + i % 4,
            true_cfg_scale=(1.0, 4.0, 2.5)[i % 3],
        )
        for i in range(count)
    ]


def alone(sampler: QwenImageSampler, image_request: ImageRequest) -> torch.Tensor:
    (outcome,) = run(sampler, [image_request])
    assert isinstance(outcome, Result)
    return outcome.latents


def test_packed_equals_alone(sampler: QwenImageSampler) -> None:
    """Everybody waits until all have arrived, so the pack is full from the first step."""
    everybody = threading.Event()
    hooked = Hooked(sampler, begin=lambda *_: everybody.wait(TIMEOUT))
    served = engine(hooked)
    tickets = [Ticket(image_request) for image_request in mixed()]
    for ticket in tickets:
        served.submit(ticket.job)
    everybody.set()
    for ticket in tickets:
        result = ticket.outcome()
        assert isinstance(result, Result)
        assert relative_error(result.latents, alone(sampler, ticket.job.request)) < 1e-5
        assert result.info["steps"] == ticket.job.request.num_inference_steps
    served.close(TIMEOUT)
    assert all(len(ticket.outcomes) == 1 for ticket in tickets)


def test_joining_late_changes_nothing(sampler: QwenImageSampler) -> None:
    first, late = mixed(2)
    late_ticket = Ticket(late)
    steps = iter(range(100))

    def join_at_step_three(pack: Pack) -> None:
        if next(steps) == 2:
            served.submit(late_ticket.job)

    served = engine(Hooked(sampler, step=join_at_step_three))
    ticket = Ticket(first)
    served.submit(ticket.job)
    assert relative_error(ticket.latents(), alone(sampler, first)) < 1e-5
    result = late_ticket.outcome()
    served.close(TIMEOUT)
    assert isinstance(result, Result)
    assert relative_error(result.latents, alone(sampler, late)) < 1e-5
    assert result.info["pack"] == {"requests_max": 2, "requests_mean": pytest.approx(1.2), "shared_steps": 1}


def test_a_cancelled_neighbour_changes_nothing(sampler: QwenImageSampler) -> None:
    keep, leave = mixed(2)
    cancelled = threading.Event()

    def cancel_at_step_two(pack: Pack) -> None:
        if any(member.request == leave and member.step == 1 for member in pack.members):
            cancelled.set()

    served = engine(Hooked(sampler, step=cancel_at_step_two, begin=lambda *_: time.sleep(0.05)))
    staying, leaving = Ticket(keep), Ticket(leave, is_cancelled=cancelled.is_set)
    served.submit(staying.job)
    served.submit(leaving.job)
    outcome = leaving.outcome()
    assert isinstance(outcome, Cancelled)
    assert "after 2 of 5 steps" in str(outcome)
    assert relative_error(staying.latents(), alone(sampler, keep)) < 1e-5
    served.close(TIMEOUT)
    assert len(leaving.outcomes) == len(staying.outcomes) == 1


def test_a_deadline_is_met_within_a_step(sampler: QwenImageSampler) -> None:
    served = engine(Hooked(sampler, step=lambda _: time.sleep(0.02)))
    late = Ticket(request(num_inference_steps=200, deadline_ms=150, accepted_ns=time.monotonic_ns()))
    started = time.monotonic()
    served.submit(late.job)
    outcome = late.outcome()
    assert isinstance(outcome, Cancelled)
    assert "DEADLINE_MS = 150" in str(outcome)
    assert time.monotonic() - started < 5
    with pytest.raises(Cancelled, match="0 of 4 steps"):
        served.submit(Ticket(request(deadline_ms=1, accepted_ns=time.monotonic_ns() - 10**9)).job)
    served.close(TIMEOUT)


def test_the_budget_bounds_every_step(sampler: QwenImageSampler) -> None:
    stats: list[StepStats] = []
    tokens = sum(row.tokens for row in sampler.rows(request(), conditioning(request())))
    served = engine(sampler, token_budget=3 * tokens, on_step=stats.append)
    tickets = [Ticket(request(seed=seed)) for seed in range(7)]
    for ticket in tickets:
        served.submit(ticket.job)
    assert all(isinstance(ticket.outcome(), Result) for ticket in tickets)
    served.close(TIMEOUT)
    assert max(step.tokens for step in stats) == 3 * tokens
    assert max(step.requests for step in stats) == 3
    assert max(step.rows for step in stats) == 6
    assert sum(step.requests for step in stats) == 7 * 4
    assert {(step.eager_forwards, step.graph_replays, step.pad_tokens) for step in stats} == {(1, 0, 0)}


def test_stats_of_steps_that_are_padded_or_split_up(tiny_checkpoint: Path) -> None:
    stats: list[StepStats] = []
    sampler = tiny_sampler(tiny_checkpoint)
    sampler._graph_tokens = 3072  # buckets as on a GPU
    broken = has_seed(13)
    failed = threading.Event()

    def fail(pack: Pack) -> None:
        if broken(pack):
            failed.set()
            raise RuntimeError("broken")

    served = engine(Hooked(sampler, step=fail), on_step=stats.append)
    good, bad = Ticket(request(seed=1)), Ticket(request(seed=13))
    served.submit(good.job)
    served.submit(bad.job)
    good.latents()
    assert isinstance(bad.outcome(), GenerationFailed)
    served.close(TIMEOUT)
    for step in stats:
        bucket = bucket_for([row for _ in range(step.requests) for row in rows_of(sampler)], 3072)
        assert bucket is not None
        alone = step.requests == 1 and step.eager_forwards == 1
        assert step.pad_tokens == (bucket.tokens - step.tokens if alone else 0)
    assert sum(step.eager_forwards for step in stats) == 4, "one a step of the good one's, whoever was in its pack"
    assert failed.is_set()


def rows_of(sampler: QwenImageSampler) -> tuple[Row, ...]:
    return sampler.rows(request(), conditioning(request()))


def test_the_queue_time_counts_from_the_jobs_arrival(sampler: QwenImageSampler) -> None:
    """Not from its place in the queue: what it waited for that is waiting too."""
    served = engine(sampler)
    ticket = Ticket(request(), arrived=time.monotonic() - 100)
    served.submit(ticket.job)
    outcome = ticket.outcome()
    served.close(TIMEOUT)
    assert isinstance(outcome, Result)
    assert 100_000 < outcome.info["queue_ms"] < 160_000
    assert outcome.info["denoise_ms"] < 60_000


def test_a_short_request_goes_before_a_long_one_and_neither_changes(sampler: QwenImageSampler) -> None:
    """With room for one at a time, the long one pauses; pausing leaves no trace in its latents."""
    long, short = request(seed=1, num_inference_steps=12), request(seed=2, num_inference_steps=2)
    order: list[int] = []
    short_ticket = Ticket(short)

    def arrive_at_step_three(pack: Pack) -> None:
        order.append(pack.members[0].request.seed)
        if len(order) == 3:
            served.submit(short_ticket.job)

    served = engine(Hooked(sampler, step=arrive_at_step_three), token_budget=1)
    long_ticket = Ticket(long)
    served.submit(long_ticket.job)
    assert relative_error(short_ticket.latents(), alone(sampler, short)) < 1e-5
    assert relative_error(long_ticket.latents(), alone(sampler, long)) < 1e-5
    served.close(TIMEOUT)
    assert order == [1] * 3 + [2] * 2 + [1] * 9


@pytest.mark.parametrize("shape", [(0, 32), (4, 31), (4096, 32)])
def test_text_that_does_not_fit_is_refused_at_the_door(sampler: QwenImageSampler, shape: tuple[int, int]) -> None:
    served = engine(sampler)
    for field, pair in [
        ("EMBEDS", Conditioning(torch.zeros(shape), torch.zeros(3, 32))),
        ("NEGATIVE_EMBEDS", Conditioning(torch.zeros(3, 32), torch.zeros(shape))),
    ]:
        with pytest.raises(InvalidRequest, match=f"^{field} = "):
            served.submit(Ticket(request(), conditioning=pair).job)
    with pytest.raises(InvalidRequest, match="NEGATIVE_EMBEDS"):
        served.submit(Ticket(request(), conditioning=Conditioning(torch.zeros(3, 32), None)).job)
    served.close(TIMEOUT)


def test_close_finishes_what_was_accepted(sampler: QwenImageSampler) -> None:
    served = engine(sampler)
    tickets = [Ticket(image_request) for image_request in mixed(5)]
    for ticket in tickets:
        served.submit(ticket.job)
    served.close(TIMEOUT)
    assert all(isinstance(ticket.outcome(), Result) for ticket in tickets)
    with pytest.raises(Unavailable, match="shutting down"):
        served.submit(Ticket(request()).job)


def test_close_fails_what_it_cannot_finish_in_time(sampler: QwenImageSampler) -> None:
    served = engine(Hooked(sampler, step=lambda _: time.sleep(0.05)), token_budget=1)
    running, waiting = (Ticket(request(num_inference_steps=200, seed=seed)) for seed in (7, 8))
    served.submit(running.job)
    served.submit(waiting.job)
    started = time.monotonic()
    served.close(0.2)
    assert time.monotonic() - started < 5
    assert isinstance(running.outcome(), Unavailable)
    assert isinstance(waiting.outcome(), Unavailable)
