"""Which series of ours /metrics has. All there are: ``metrics`` makes no others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: its kind, what it says, the label that tells its series apart, the buckets of a histogram."""

    kind: str  # COUNTER, GAUGE or HISTOGRAM
    description: str
    label: str | None = None
    buckets: tuple[float, ...] = ()

    def samples(self, name: str) -> tuple[str, ...]:
        """The names under which /metrics shows it."""
        return tuple(name + suffix for suffix in ("_bucket", "_sum", "_count")) if self.buckets else (name,)


_STEP_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STAGE_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(float(2**power) for power in range(8, 18))
_PAD_TOKENS = (0.0, *(float(2**power) for power in range(13)))

SERIES = {
    "ditpack_requests_total": Series("COUNTER", "Requests by how they ended", "outcome"),
    "ditpack_cache_hits_total": Series("COUNTER", "An encoder's answers that it had computed before", "model"),
    "ditpack_cache_misses_total": Series("COUNTER", "An encoder's answers that it had to compute", "model"),
    "ditpack_steps_total": Series("COUNTER", "Denoising steps (packed forwards)", "engine"),
    "ditpack_shared_steps_total": Series("COUNTER", "Steps that carried more than one request"),
    "ditpack_step_requests_total": Series("COUNTER", "Requests in the pack, summed over steps; over steps: mean pack"),
    "ditpack_step_tokens_total": Series("COUNTER", "Tokens in the pack, summed over steps"),
    "ditpack_step_seconds_total": Series("COUNTER", "Seconds spent in steps"),
    "ditpack_graph_replays_total": Series("COUNTER", "Forwards run from a CUDA graph"),
    "ditpack_eager_forwards_total": Series("COUNTER", "Forwards run eagerly"),
    "ditpack_active_requests": Series("GAUGE", "Requests being denoised", "engine"),
    "ditpack_active_rows": Series("GAUGE", "Rows (guidance branches) of the requests being denoised", "engine"),
    "ditpack_waiting_requests": Series("GAUGE", "Requests that wait for their turn", "engine"),
    "ditpack_step_seconds": Series("HISTOGRAM", "Seconds of a step", buckets=_STEP_SECONDS),
    "ditpack_step_tokens": Series("HISTOGRAM", "Tokens in a step's pack, without padding", buckets=_TOKENS),
    "ditpack_step_pad_tokens": Series("HISTOGRAM", "Padding tokens in a step's pack", buckets=_PAD_TOKENS),
    "ditpack_stage_seconds": Series("HISTOGRAM", "Seconds that a request spent in a stage", "stage", _STAGE_SECONDS),
    "ditpack_time_to_first_step_seconds": Series(
        "HISTOGRAM", "Seconds from a request's acceptance to its first step", buckets=_STAGE_SECONDS
    ),
    "ditpack_request_seconds": Series(
        "HISTOGRAM", "Seconds from a request's acceptance to its image", buckets=_STAGE_SECONDS
    ),
}
