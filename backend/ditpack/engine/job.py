"""What goes into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ditpack.errors import DitpackError
from ditpack.request import Request


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request: its latents, fp32 [z_dim, h, w] on the CPU, and the figures of its way through the engine."""

    latents: Tensor
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A resolved request and how to answer it.

    ``deliver`` is called exactly once, always on the engine's delivery thread. ``is_cancelled`` is asked once a step.
    """

    request: Request
    request_id: str
    conditioning: Any  # what the sampler's ``conditioning`` returned
    deliver: Callable[[Result | DitpackError], None]
    is_cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step of the engine: what it carried, who was left waiting, its wall time in seconds."""

    requests: int
    rows: int
    tokens: int
    waiting: int
    seconds: float
    graph_replays: int  # forwards of it that ran from a captured CUDA graph
