"""Arrival patterns, and how a run of them is judged."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SIZES = [(1024, 1024), (1024, 768), (768, 1024), (512, 512)]  # (width, height)
SLO_SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)


@dataclass(frozen=True)
class Arrival:
    """One request of a trace: when it comes, in seconds, its size in pixels, its steps."""

    at: float
    size: tuple[int, int]
    steps: int


def burst(steps: int) -> list[Arrival]:
    """s0: eight at once, neighbours of equal size."""
    return [Arrival(0.0, size, steps) for size in SIZES for _ in range(2)]


def staggered(steps: int, every: float) -> list[Arrival]:
    """s1: eight in mixed order, one ``every`` so many seconds."""
    return [Arrival(i * every, size, steps) for i, size in enumerate(SIZES * 2)]


def poisson(steps: int, rate: float, count: int, seed: int = 0) -> list[Arrival]:
    """``count`` requests of mixed sizes at ``rate`` a second."""
    chance = random.Random(seed)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += chance.expovariate(rate)
        arrivals.append(Arrival(at, chance.choice(SIZES), steps))
    return arrivals


def judge(arrivals: list[Arrival], finished: list[float], solo: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Makespan, latencies, rate and SLO attainment. ``solo``: seconds a size takes with the machine to itself.

    SLO at scale c: the share of requests answered within c times the time they take alone.
    """
    latencies = [done - arrival.at for arrival, done in zip(arrivals, finished, strict=True)]
    ordered = sorted(latencies)

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    makespan = max(finished) - arrivals[0].at
    within = {
        str(scale): sum(took <= scale * solo[a.size] for took, a in zip(latencies, arrivals, strict=True))
        / len(arrivals)
        for scale in SLO_SCALES
    }
    return {
        "requests": len(arrivals),
        "makespan_s": round(makespan, 3),
        "images_per_s": round(len(arrivals) / makespan, 4),
        "mean_s": round(sum(latencies) / len(latencies), 3),
        "p50_s": round(percentile(0.5), 3),
        "p95_s": round(percentile(0.95), 3),
        "p99_s": round(percentile(0.99), 3),
        "slo": {scale: round(share, 3) for scale, share in within.items()},
    }
