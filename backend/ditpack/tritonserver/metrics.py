"""Our Prometheus metrics, beside Triton's on /metrics. With metrics off (``--allow-metrics=false``) they do nothing.

An operation takes Triton some 10 us and goes through one thread that all of an instance's calls share: a dozen a step
are fine, one a token is not. None is done on the engine's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from ditpack.tritonserver.errors import OUTCOMES
from ditpack.tritonserver.series import SERIES

if TYPE_CHECKING:
    from ditpack.engine.job import StepStats


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
        """For a gauge of this engine's own: Triton hears of changes only."""
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
    """What an engine does. Each has gauges and a step counter of its own; the rest adds up over all of a server's.

    For one thread: the engine's delivery thread. ``engine`` is the name of Triton's instance; the label is not called
    ``instance``, because Prometheus calls the server that.
    """

    def __init__(self, engine: str) -> None:
        self._steps = _Metric("ditpack_steps_total", engine)
        self._requests = _Metric("ditpack_step_requests_total")
        self._shared = _Metric("ditpack_shared_steps_total")
        self._seconds = _Metric("ditpack_step_seconds_total")
        self._replays = _Metric("ditpack_graph_replays_total")
        self._eager = _Metric("ditpack_eager_forwards_total")
        self._tokens = _Metric("ditpack_step_tokens_total")
        self._active = _Metric("ditpack_active_requests", engine)
        self._rows = _Metric("ditpack_active_rows", engine)
        self._waiting = _Metric("ditpack_waiting_requests", engine)
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


class CacheMetrics:
    """How often an encoder need not compute. The instances of one model share its two series."""

    def __init__(self, model: str) -> None:
        self._hits = _Metric("ditpack_cache_hits_total", model)
        self._misses = _Metric("ditpack_cache_misses_total", model)

    def answered(self, hits: int, misses: int) -> None:
        """Count the answers of one call."""
        self._hits.add(hits)
        self._misses.add(misses)


class DecoderMetrics:
    """The end of a request that got its image."""

    def __init__(self) -> None:
        self._decode = _Metric("ditpack_stage_seconds", "decode")
        self._total = _Metric("ditpack_request_seconds")

    def decoded(self, decode_s: float, total_s: float) -> None:
        """Record the seconds of the decoding (the image file included), and since the request was accepted."""
        self._decode.observe(decode_s)
        self._total.observe(total_s)
