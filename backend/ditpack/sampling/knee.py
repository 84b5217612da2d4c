"""Where packing more stops paying: the measured knee of a device's throughput, the default token budget."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from ditpack.sampling.sampler import Sampler

logger = logging.getLogger(__name__)

_CPU_BUDGET = 16384
_SHARE = 0.95  # of the best throughput; what lies beyond it costs latency for a few percent
_SIZES = (1024, 2048, 4096, 8192, 16384)  # tokens of the packs that are timed


@dataclass(frozen=True, slots=True)
class Knee:
    """``tokens``: the smallest pack with nearly the best throughput. ``rates``: pack size → tokens a second."""

    tokens: int
    rates: dict[int, int]


def measure_knee(sampler: Sampler[Any, Any], sizes: tuple[int, ...] = _SIZES) -> Knee:
    """Time one step of packs of growing size, rows of about a thousand tokens each.

    Stops early where a step takes long enough to be past any knee. A few seconds for the 20 B model on one GPU.
    """
    rates: dict[int, int] = {}
    for size in sizes:
        seconds = _step_seconds(sampler, rows=max(1, size // 1024), tokens=min(size, 1024))
        rates[size] = round(size / seconds)
        if seconds > 1:
            break
    best = max(rates.values())
    return Knee(next(size for size, rate in rates.items() if rate >= _SHARE * best), rates)


def default_token_budget(sampler: Sampler[Any, Any]) -> int:
    """The measured knee on a GPU, whose kernels are warm after it; a constant on a CPU, where runs must repeat."""
    if sampler.device.type != "cuda":
        return _CPU_BUDGET
    knee = measure_knee(sampler)
    logger.info(
        "token budget: %d, where packing more stops paying (tokens/s by pack size: %s)", knee.tokens, knee.rates
    )
    return knee.tokens


def _step_seconds(sampler: Sampler[Any, Any], rows: int, tokens: int) -> float:
    pack = sampler.pack([sampler.begin(*sampler.example(tokens)) for _ in range(rows)])
    times = []
    for _ in range(6):  # the first compile, tune and capture
        sampler.check_device()
        started = time.perf_counter()
        sampler.step(pack)
        sampler.check_device()  # waits for the device
        times.append(time.perf_counter() - started)
    return min(times[3:])
