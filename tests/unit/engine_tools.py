"""Driving an engine from a test: jobs whose outcomes can be waited for, and samplers that misbehave on purpose."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from oracle import request

from ditpack.engine.engine import Engine
from ditpack.engine.job import Job, Result
from ditpack.errors import DitpackError
from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import load_sampler
from ditpack.request import ImageRequest
from ditpack.sampling.qwen_image import Conditioning, Denoising, Pack, QwenImageSampler

TIMEOUT = 60.0  # seconds; every wait of the tests ends


class Ticket:
    """A submitted job. ``outcomes`` counts the answers, so that a second one is seen."""

    def __init__(self, image_request: Any, **job: Any) -> None:
        self.outcomes: list[Result | DitpackError] = []
        self._arrived: queue.SimpleQueue[Result | DitpackError] = queue.SimpleQueue()
        if "conditioning" not in job:
            job["conditioning"] = conditioning(image_request)
        self.job = Job(request=image_request, request_id=f"seed-{image_request.seed}", deliver=self._deliver, **job)

    def _deliver(self, outcome: Result | DitpackError) -> None:
        self.outcomes.append(outcome)
        self._arrived.put(outcome)

    def outcome(self) -> Result | DitpackError:
        return self._arrived.get(timeout=TIMEOUT)

    def latents(self) -> torch.Tensor:
        outcome = self.outcome()
        if isinstance(outcome, DitpackError):
            raise outcome
        return outcome.latents


def conditioning(image_request: ImageRequest, width: int = 32) -> Conditioning:
    """Text features that depend on the prompt and its length only."""

    def features(text: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, text)))
        return torch.randn(5 + len(text), width, generator=generator)

    negative = image_request.negative_prompt
    return Conditioning(features(image_request.prompt), None if negative is None else features(negative))


def tiny_sampler(checkpoint: Path) -> QwenImageSampler:
    return load_sampler(open_checkpoint(checkpoint), torch.device("cpu"), torch.float32)


class Hooked:
    """A sampler whose verbs first call a hook, which may raise, block or submit more work."""

    def __init__(self, sampler: QwenImageSampler, **hooks: Callable[..., None]) -> None:
        self._sampler = sampler
        self._hooks = hooks

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._sampler, name)
        hook = self._hooks.get(name)
        if hook is None:
            return attribute

        def call(*args: Any) -> Any:
            hook(*args)
            return attribute(*args)

        return call


def engine(sampler: Any, *, token_budget: int = 10_000, max_queue_size: int = 64, **options: Any) -> Engine:
    return Engine(sampler, token_budget=token_budget, max_queue_size=max_queue_size, **options)


def start(served: Engine, ticket: Ticket) -> None:
    """Submit it and wait until it takes part in a step."""
    served.submit(ticket.job)
    until = time.monotonic() + TIMEOUT
    while served.active_requests == 0:
        assert time.monotonic() < until
        time.sleep(0.001)


def run(sampler: Any, requests: list[ImageRequest]) -> list[Result | DitpackError]:
    """Serve ``requests`` with an engine of their own; the outcomes in order."""
    served = engine(sampler)
    try:
        tickets = [Ticket(image_request) for image_request in requests]
        for ticket in tickets:
            served.submit(ticket.job)
        return [ticket.outcome() for ticket in tickets]
    finally:
        served.close(TIMEOUT)


def has_seed(seed: int) -> Callable[[Pack], bool]:
    return lambda pack: any(member.request.seed == seed for member in pack.members)


__all__ = [
    "TIMEOUT",
    "Denoising",
    "Hooked",
    "Ticket",
    "conditioning",
    "engine",
    "has_seed",
    "request",
    "run",
    "start",
    "tiny_sampler",
]
