"""What the engine's process and its workers tell each other, pickled, over a socket pair a worker.

To a worker: its ``WorkerConfig``, then (number, verb, arguments, forgotten members' keys) for each call. From it:
("answer", number, result or ``Failure``), ("latents", ticket, array), ("log", level, logger, text) and ("beat",).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ditpack.models.checkpoint import Checkpoint

BEAT_S = 0.5  # how often a worker with nothing to say shows that it lives


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is told first; all workers of a group are told the same, but for the rank."""

    rank: int
    devices: tuple[str, ...]  # "cuda:<ordinal>" or "cpu", one a rank
    store: str  # the file by which the ranks find each other
    checkpoint: Checkpoint
    dtype: torch.dtype
    attention: str
    quantization: str
    parallel: str  # tokens or rows
    sp_padding: str
    collective_timeout_s: float

    @property
    def device(self) -> str:
        return self.devices[self.rank]


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer of a rank that could not do what it was told; ``setting`` as in ``UnusableError``."""

    reason: str
    trace: str
    setting: str | None = None
