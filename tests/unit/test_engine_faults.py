"""What goes wrong for one request stays with it; what goes wrong for the engine is told to everybody at once."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import TIMEOUT, Hooked, Ticket, engine, has_seed, request, run, tiny_sampler
from oracle import relative_error

from ditpack.engine.job import Result
from ditpack.errors import Cancelled, DitpackError, GenerationFailed, Unavailable
from ditpack.sampling.qwen_image import Pack, QwenImageSampler

GUILTY = 666


@pytest.fixture(scope="module")
def sampler(tiny_checkpoint: Path) -> QwenImageSampler:
    return tiny_sampler(tiny_checkpoint)


def outcome_of(sampler: Any, *seeds: int) -> dict[int, Result | DitpackError]:
    return dict(zip(seeds, run(sampler, [request(seed=seed) for seed in seeds]), strict=True))


def raise_for_guilty(pack: Pack) -> None:
    if has_seed(GUILTY)(pack):
        raise RuntimeError("device-side assert in /secret/path.cu")


@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_forward_that_raises_for_one_kills_one(sampler: QwenImageSampler, position: int) -> None:
    seeds = [1, 2, 3, 4, 5]
    seeds.insert(position, GUILTY)
    outcomes = outcome_of(Hooked(sampler, step=raise_for_guilty), *seeds)
    guilty = outcomes.pop(GUILTY)
    assert isinstance(guilty, GenerationFailed)
    assert "secret" not in str(guilty)
    for seed, outcome in outcomes.items():
        assert isinstance(outcome, Result)
        expected = outcome_of(sampler, seed)[seed]
        assert isinstance(expected, Result)
        assert relative_error(outcome.latents, expected.latents) < 1e-5


def test_a_request_that_cannot_begin_kills_one(sampler: QwenImageSampler) -> None:
    def refuse(image_request: Any, _: Any) -> None:
        if image_request.seed == GUILTY:
            raise MemoryError

    outcomes = outcome_of(Hooked(sampler, begin=refuse), 1, GUILTY, 3)
    assert isinstance(outcomes[GUILTY], GenerationFailed)
    assert all(isinstance(outcomes[seed], Result) for seed in (1, 3))


def test_latents_that_are_not_finite_kill_one(sampler: QwenImageSampler) -> None:
    def poison(pack: Pack) -> None:
        for member in pack.members:
            if member.request.seed == GUILTY:
                member.embeds[0].fill_(float("nan"))
                pack.text = torch.cat([m.embeds[0] for m in pack.members] + [m.embeds[1] for m in pack.members])

    outcomes = outcome_of(Hooked(sampler, step=poison), 1, GUILTY, 3)
    assert isinstance(outcomes[GUILTY], GenerationFailed)
    assert "not finite" in str(outcomes[GUILTY])
    assert all(isinstance(outcomes[seed], Result) for seed in (1, 3))


def test_a_cancel_check_that_raises_kills_one(sampler: QwenImageSampler) -> None:
    def broken() -> bool:
        raise OSError("gone")

    served = engine(sampler)
    good, bad = Ticket(request(seed=1)), Ticket(request(seed=2), is_cancelled=broken)
    served.submit(bad.job)
    served.submit(good.job)
    assert isinstance(bad.outcome(), GenerationFailed)
    assert isinstance(good.outcome(), Result)
    served.close(TIMEOUT)


def test_a_receiver_that_raises_harms_nobody(sampler: QwenImageSampler, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Ticket):
        def _deliver(self, outcome: Result | DitpackError) -> None:
            raise BrokenPipeError

    served = engine(sampler)
    broken, good = Broken(request(seed=1)), Ticket(request(seed=2))
    served.submit(broken.job)
    served.submit(good.job)
    assert isinstance(good.outcome(), Result)
    served.close(TIMEOUT)
    assert "could not be delivered" in caplog.text


@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt])
def test_a_dead_engine_tells_everybody_at_once(sampler: QwenImageSampler, death: type[BaseException]) -> None:
    dying = threading.Event()

    def die(pack: Pack) -> None:
        dying.wait(TIMEOUT)
        raise death

    served = engine(Hooked(sampler, step=die), token_budget=1)
    tickets = [Ticket(request(seed=seed)) for seed in range(4)]
    for ticket in tickets:
        served.submit(ticket.job)
    assert served.healthy
    dying.set()
    for ticket in tickets:
        outcome = ticket.outcome()
        assert isinstance(outcome, Unavailable)
        assert "restarted" in str(outcome)
    assert not served.healthy
    with pytest.raises(Unavailable, match="the engine stopped"):
        served.submit(Ticket(request()).job)
    served.close(TIMEOUT)


def test_a_lost_device_ends_the_engine(sampler: QwenImageSampler) -> None:
    """After a failed step the device is asked whether it still works; when not, bisecting would be pointless."""

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    outcomes = outcome_of(Hooked(sampler, step=fail, check_device=fail), 1, 2)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes.values())


def test_two_hundred_mixed_requests_are_all_answered_once(sampler: QwenImageSampler) -> None:
    """A tenth fail, a tenth are cancelled, a tenth have deadlines; nobody is forgotten or answered twice."""
    chance = random.Random(0)

    def fail_some(pack: Pack) -> None:
        if any(member.request.seed % 10 == 3 for member in pack.members):
            raise RuntimeError("bad row")

    served = engine(Hooked(sampler, step=fail_some), token_budget=600, max_queue_size=200)
    tickets, refused = [], 0
    for seed in range(200):
        kind = seed % 10
        cancelled = threading.Event()
        image_request = request(
            seed=seed,
            width=chance.choice([32, 48, 64]),
            height=chance.choice([32, 48, 64]),
            num_inference_steps=chance.randint(1, 5),
            true_cfg_scale=chance.choice([1.0, 4.0]),
            deadline_ms=chance.randint(1, 60) if kind == 7 else None,
            accepted_ns=time.monotonic_ns(),
        )
        ticket = Ticket(image_request, is_cancelled=cancelled.is_set)
        try:
            served.submit(ticket.job)
        except Cancelled:
            refused += 1
            continue
        if kind == 5:
            threading.Timer(chance.random() * 0.05, cancelled.set).start()
        tickets.append(ticket)
    outcomes = [ticket.outcome() for ticket in tickets]
    served.close(TIMEOUT)
    assert len(outcomes) + refused == 200
    assert all(len(ticket.outcomes) == 1 for ticket in tickets)
    for ticket, outcome in zip(tickets, outcomes, strict=True):
        kind = ticket.job.request.seed % 10
        expected = {3: GenerationFailed, 5: (Cancelled, Result), 7: (Cancelled, Result)}.get(kind, Result)
        assert isinstance(outcome, expected), (kind, outcome)  # type: ignore[arg-type]
