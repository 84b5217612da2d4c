"""What goes into the engine and what comes out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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

    ``deliver`` is called exactly once, always on the engine's delivery thread. ``is_cancelled`` is asked once a step,
    and now and then while it waits. ``timeout_s``: the longest wait for its first step.
    """

    request: Request
    request_id: str
    conditioning: Any  # what the sampler's ``conditioning`` returned
    deliver: Callable[[Result | DitpackError], None]
    is_cancelled: Callable[[], bool] = lambda: False
    timeout_s: float = math.inf
    arrived: float = field(default_factory=time.monotonic)  # when its wait began


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a request stands.

    ``position`` counts those that have not begun, from 1, by priority and arrival; 0 once it has begun. ``seconds``:
    since then. ``preview``: the step after which the latest was made, and a function that waits for it: the latents
    that the model expects to end with, as in ``Result``.
    """

    step: int
    steps: int
    position: int
    seconds: float = field(compare=False)
    preview: tuple[int, Callable[[], Tensor]] | None


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step of the engine: what it carried, who was left waiting, its wall time in seconds."""

    requests: int
    rows: int
    tokens: int
    waiting: int
    seconds: float
    graph_replays: int  # forwards of it that ran from a captured CUDA graph
    eager_forwards: int  # the others; several when a failed step was split up
    pad_tokens: int  # tokens of padding in the forward, on top of ``tokens``; 0 when the step was split up
