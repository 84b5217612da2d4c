"""Engines over worker processes on the CPU, and looking at these processes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import plan_sampler
from ditpack.parallel.messages import WorkerConfig
from ditpack.parallel.sampler import ParallelSampler


def parallel_sampler(
    checkpoint: Path, ranks: int = 2, timeout_s: float = 30.0, restart: bool = True, **changes: Any
) -> ParallelSampler:
    opened = open_checkpoint(checkpoint)
    settings: dict[str, Any] = {
        "rank": 0,
        "devices": ("cpu",) * ranks,
        "store": "",
        "checkpoint": opened,
        "dtype": torch.float32,
        "attention": "auto",
        "quantization": "none",
        "parallel": "tokens",
        "sp_padding": "segment",
        "collective_timeout_s": 60.0,
    }
    return ParallelSampler(plan_sampler(opened), WorkerConfig(**settings | changes), timeout_s, restart)


def alive(pids: Iterable[int]) -> list[int]:
    """Those of ``pids`` that are processes and not only zombies."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found.append(pid)
    return found


def gone(pids: Iterable[int], timeout: float) -> bool:
    """Whether all of them end within ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while alive(pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
