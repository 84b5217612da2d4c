"""Our Prometheus metrics, beside Triton's on /metrics. With metrics off (``--allow-metrics=false``) they do nothing.

An operation takes Triton some 10 us and goes through one thread that all of an instance's calls share: a dozen a step
are fine, one a token is not. None is done on the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from ditpack.tritonserver.errors import OUTCOMES

if TYPE_CHECKING:
    from ditpack.engine.job import StepStats


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
    "ditpack_steps_total": Series("COUNTER", "Denoising steps (packed forwards)"),
    "ditpack_shared_steps_total": Series("COUNTER", "Steps that carried more than one request"),
    "ditpack_step_requests_total": Series("COUNTER", "Requests in the pack, summed over steps; over steps: mean pack"),
    "ditpack_step_tokens_total": Series("COUNTER", "Tokens in the pack, summed over steps"),
    "ditpack_step_seconds_total": Series("COUNTER", "Seconds spent in steps"),
    "ditpack_graph_replays_total": Series("COUNTER", "Forwards run from a CUDA graph"),
    "ditpack_eager_forwards_total": Series("COUNTER", "Forwards run eagerly"),
    "ditpack_active_requests": Series("GAUGE", "Requests being denoised", "instance"),
    "ditpack_active_rows": Series("GAUGE", "Rows (guidance branches) of the requests being denoised", "instance"),
    "ditpack_waiting_requests": Series("GAUGE", "Requests in the waiting room", "instance"),
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


class _Metric:
    """One series, labelled ``label``. It keeps its family alive: Triton invalidates the metrics of a dropped one."""

    def __init__(self, name: str, label: str | None = None) -> None:
        self._value: float | None = None
        self._series = None
        series = SERIES[name]
        labels = {} if series.label is None else {series.label: label}
        buckets = {"buckets": list(series.buckets)} if series.buckets else {}
        kind = getattr(pb_utils.MetricFamily, series.kind, None)
        if kind is None:  # no histograms before Triton 24.08
            pb_utils.Logger.log_info(f"metric {name} is off: this Triton has no {series.kind}")
            return
        try:
            self._family = pb_utils.MetricFamily(name=name, description=series.description, kind=kind)
            self._series = self._family.Metric(labels=labels, **buckets)
        except pb_utils.TritonModelException as reason:
            pb_utils.Logger.log_info(f"metric {name} is off: {reason}")

    def add(self, amount: float = 1) -> None:
        if self._series is not None and amount:
            self._series.increment(amount)

    def set(self, value: float) -> None:
        """For a gauge of this instance's own: Triton hears of changes only."""
        if self._series is not None and value != self._value:
            self._series.set(value)
            self._value = value

    def observe(self, value: float) -> None:
        if self._series is not None:
            self._series.observe(value)


class RequestMetrics:
    """``ditpack_requests_total{outcome}``: each request once, counted by the model where it ended.

    The instances that name the same series share it, so this is one counter for the whole server.
    """

    def __init__(self) -> None:
        self._by_outcome = {outcome: _Metric("ditpack_requests_total", outcome) for outcome in OUTCOMES}

    def count(self, outcome: str) -> None:
        self._by_outcome[outcome].add()


class EngineMetrics:
    """What the engine does. Counters add up over all instances; the gauges have one series an instance.

    For one thread: the engine's delivery thread.
    """

    def __init__(self, instance: str) -> None:
        self._steps = _Metric("ditpack_steps_total")
        self._requests = _Metric("ditpack_step_requests_total")
        self._shared = _Metric("ditpack_shared_steps_total")
        self._seconds = _Metric("ditpack_step_seconds_total")
        self._replays = _Metric("ditpack_graph_replays_total")
        self._eager = _Metric("ditpack_eager_forwards_total")
        self._tokens = _Metric("ditpack_step_tokens_total")
        self._active = _Metric("ditpack_active_requests", instance)
        self._rows = _Metric("ditpack_active_rows", instance)
        self._waiting = _Metric("ditpack_waiting_requests", instance)
        self._step_seconds = _Metric("ditpack_step_seconds")
        self._step_tokens = _Metric("ditpack_step_tokens")
        self._step_pad_tokens = _Metric("ditpack_step_pad_tokens")
        self._stages = {stage: _Metric("ditpack_stage_seconds", stage) for stage in ("encode", "queue", "denoise")}
        self._first_step = _Metric("ditpack_time_to_first_step_seconds")

    def step(self, stats: StepStats) -> None:
        """Count one step."""
        self._steps.add()
        self._requests.add(stats.requests)
        self._tokens.add(stats.tokens)
        self._seconds.add(stats.seconds)
        self._replays.add(stats.graph_replays)
        self._eager.add(stats.eager_forwards)
        if stats.requests > 1:
            self._shared.add()
        self._step_seconds.observe(stats.seconds)
        self._step_tokens.observe(stats.tokens)
        self._step_pad_tokens.observe(stats.pad_tokens)
        self.load(stats.requests, stats.rows, stats.waiting)

    def load(self, active: int, rows: int, waiting: int) -> None:
        """Set what the engine has now; also called when a request leaves, so that an idle engine shows 0."""
        self._active.set(active)
        self._rows.set(rows)
        self._waiting.set(waiting)

    def denoised(self, encode_s: float, queue_s: float, denoise_s: float) -> None:
        """Record the seconds of a request whose last step is done: to arrive here, to its first step, of its steps."""
        for stage, seconds in (("encode", encode_s), ("queue", queue_s), ("denoise", denoise_s)):
            self._stages[stage].observe(seconds)
        self._first_step.observe(encode_s + queue_s)


class DecoderMetrics:
    """The end of a request that got its image."""

    def __init__(self) -> None:
        self._decode = _Metric("ditpack_stage_seconds", "decode")
        self._total = _Metric("ditpack_request_seconds")

    def decoded(self, decode_s: float, total_s: float) -> None:
        """Record the seconds of the decoding (the image file included), and since the request was accepted."""
        self._decode.observe(decode_s)
        self._total.observe(total_s)
