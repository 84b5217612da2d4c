"""Our Prometheus metrics, beside Triton's on /metrics. With metrics off (``--allow-metrics=false``) they do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from ditpack.tritonserver.errors import OUTCOMES

if TYPE_CHECKING:
    from ditpack.engine.job import StepStats


class _Metric:
    """One series. It keeps its family alive: Triton invalidates the metrics of a family that Python has dropped."""

    def __init__(self, name: str, description: str, kind: str, labels: dict[str, str] | None = None) -> None:
        try:
            self._family = pb_utils.MetricFamily(
                name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind)
            )
            self._series = self._family.Metric(labels=labels or {})
        except pb_utils.TritonModelException as reason:
            pb_utils.Logger.log_info(f"metric {name} is off: {reason}")
            self._series = None

    def add(self, amount: float = 1) -> None:
        if self._series is not None:
            self._series.increment(amount)

    def set(self, value: float) -> None:
        if self._series is not None:
            self._series.set(value)


class RequestMetrics:
    """``ditpack_requests_total{outcome}``: each request once, counted by the model where it ended.

    The instances that name the same series share it, so this is one counter for the whole server.
    """

    def __init__(self) -> None:
        self._by_outcome = {
            outcome: _Metric("ditpack_requests_total", "Requests by how they ended", "COUNTER", {"outcome": outcome})
            for outcome in OUTCOMES
        }

    def count(self, outcome: str) -> None:
        self._by_outcome[outcome].add()


class StepMetrics:
    """What the engine's steps did. Counters add up over all instances; the gauges have one series an instance."""

    def __init__(self, instance: str) -> None:
        labels = {"instance": instance}
        self._steps = _Metric("ditpack_steps_total", "Denoising steps (packed forwards)", "COUNTER")
        self._requests = _Metric(
            "ditpack_step_requests_total", "Requests in the pack, summed over steps; over steps: mean pack", "COUNTER"
        )
        self._shared = _Metric("ditpack_shared_steps_total", "Steps that carried more than one request", "COUNTER")
        self._seconds = _Metric("ditpack_step_seconds_total", "Seconds spent in steps", "COUNTER")
        self._replays = _Metric("ditpack_graph_replays_total", "Forwards run from a CUDA graph, not eagerly", "COUNTER")
        self._tokens = _Metric("ditpack_step_tokens_total", "Tokens in the pack, summed over steps", "COUNTER")
        self._active = _Metric("ditpack_active_requests", "Requests being denoised", "GAUGE", labels)
        self._waiting = _Metric("ditpack_waiting_requests", "Requests in the waiting room", "GAUGE", labels)

    def step(self, stats: StepStats) -> None:
        """Count one step."""
        self._steps.add()
        self._requests.add(stats.requests)
        self._tokens.add(stats.tokens)
        self._seconds.add(stats.seconds)
        self._replays.add(stats.graph_replays)
        if stats.requests > 1:
            self._shared.add()
        self.load(stats.requests, stats.waiting)

    def load(self, active: int, waiting: int) -> None:
        """Set how many requests the engine has now; also called when one leaves, so that an idle engine shows 0."""
        self._active.set(active)
        self._waiting.set(waiting)
