"""A double of ``triton_python_backend_utils`` as tritonserver 2.51 has it, misuse errors included.

``fake_triton`` drives models with it and holds their answers to config.pbtxt, which Triton itself does not do.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

_NUMPY_TYPES = {
    "TYPE_UINT8": np.uint8,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}


class TritonModelException(Exception):
    pass


class TritonError:
    NAMES = (
        *("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG"),
        *("UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"),
    )
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = 1) -> None:
        if not isinstance(message, str) or not isinstance(code, int):
            raise TypeError("TritonError(message: str, code)")
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        if not isinstance(array, np.ndarray) or array.dtype not in [np.dtype(t) for t in _NUMPY_TYPES.values()]:
            raise TritonModelException(f"tensor {name}: unsupported {array!r}")
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        if error is not None and not isinstance(error, TritonError):
            raise TypeError("error must be a TritonError")
        if not all(isinstance(tensor, Tensor) for tensor in output_tensors):
            raise TypeError("output_tensors must be Tensors")
        self._outputs, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def error(self) -> TritonError | None:
        return self._error

    def has_error(self) -> bool:
        return self._error is not None


class ResponseSender:
    """The sender of a model in default (not decoupled) mode."""

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        with self._lock:
            if self._closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            if response is None and not flags:
                raise TritonModelException("Inference Response object must be provided when the flags is zero.")
            if flags and response is None and not self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
            if self._sent and response is not None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if failures := self._request.send_failures:
                raise failures.pop(0)
            self._sent += 1
            self._closed = bool(flags)
        if flags:  # without the final flag a client waits for ever
            self._request.answer(response)

    def is_cancelled(self) -> bool:
        return self._request.is_cancelled()


class DecoupledSender:
    """The sender of a decoupled model: any number of responses until the final flag."""

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is None and not flags:
            raise TritonModelException("Inference Response object must be provided when the flags is zero.")
        if failures := self._request.send_failures:
            raise failures.pop(0)
        self._closed = bool(flags)
        if response is not None:
            self._request.answers.append(response)
        if flags:
            self._request.answered.set()

    def is_cancelled(self) -> bool:
        return self._request.is_cancelled()


class InferenceRequest:
    """One that arrived, or with ``model_name`` one that a model makes of another (BLS)."""

    models: ClassVar[dict[str, Callable[[InferenceRequest], InferenceResponse]]] = {}  # what such requests reach

    def __init__(
        self,
        inputs: list[Tensor],
        requested_output_names: list[str],
        request_id: str = "",
        *,
        model_name: str = "",
        decoupled: bool = False,
        timeout: int = 0,
    ) -> None:
        self._inputs, self._requested, self._id = inputs, requested_output_names, request_id
        self._model_name = model_name
        self._sender: ResponseSender | DecoupledSender | None = None
        self._decoupled = decoupled
        self.cancelled = False
        self.timeout_us = timeout
        self.send_failures: list[Exception] = []  # what the next sends raise
        self.answers: list[InferenceResponse] = []
        self.answered = threading.Event()

    def answer(self, response: Any) -> None:
        self.answers.append(response)
        self.answered.set()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return list(self._requested)

    def request_id(self) -> str:
        return self._id

    def timeout(self) -> int:
        return self.timeout_us

    def is_cancelled(self) -> bool:
        return self.cancelled

    def get_response_sender(self) -> ResponseSender | DecoupledSender:
        self._sender = self._sender or (DecoupledSender if self._decoupled else ResponseSender)(self)
        return self._sender

    async def async_exec(self) -> InferenceResponse:
        try:
            return await asyncio.to_thread(self.models[self._model_name], self)
        except KeyError:
            raise TritonModelException(f"Failed for BLS: model {self._model_name!r} is not found") from None


class Metric:
    def __init__(self, family: MetricFamily, values: dict[tuple, float], labels: dict[str, str]) -> None:
        if not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        self._family = weakref.ref(family)
        self._counter = family.kind == MetricFamily.COUNTER
        self._values, self._key = values, tuple(sorted(labels.items()))
        values.setdefault(self._key, 0)

    def _check(self) -> None:
        if self._family() is None:
            raise TritonModelException("Invalid metric operation as the corresponding 'MetricFamily' has been deleted.")

    def increment(self, amount: float) -> None:
        self._check()
        if self._counter and amount < 0:
            raise TritonModelException("Failed to increment metric value: negative")
        self._values[self._key] += amount

    def set(self, value: float) -> None:
        self._check()
        if self._counter:
            raise TritonModelException("Failed to set metric value: not a gauge")
        self._values[self._key] = value

    def observe(self, value: float) -> None:
        self._check()
        raise TritonModelException("Failed to observe metric value: not a histogram")


class Histogram(Metric):
    """Its value here is the sum of what was observed."""

    def __init__(
        self, family: MetricFamily, values: dict[tuple, float], labels: dict[str, str], buckets: list[float]
    ) -> None:
        if not buckets or sorted(set(buckets)) != buckets:
            raise TritonModelException("Failed to create metric. Buckets must be ascending.")
        super().__init__(family, values, labels)

    def increment(self, amount: float) -> None:
        raise TritonModelException("Failed to increment metric value: a histogram")

    def set(self, value: float) -> None:
        raise TritonModelException("Failed to set metric value: a histogram")

    def observe(self, value: float) -> None:
        self._check()
        self._values[self._key] += value


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    enabled = True
    series: ClassVar[dict[str, dict[tuple, float]]] = {}  # name → labels → value, shared by all instances as in Triton

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        if not MetricFamily.enabled:
            raise TritonModelException("Error when creating MetricFamily: metrics are not enabled")
        self.name, self.kind = name, kind
        assert description
        assert kind in ("counter", "gauge", "histogram")

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:  # noqa: N802 - Triton's name
        values = MetricFamily.series.setdefault(self.name, {})
        if self.kind == "histogram":
            return Histogram(self, values, labels, buckets or [])
        assert buckets is None
        return Metric(self, values, labels)


class Logger:
    lines: ClassVar[list[tuple[str, str]]] = []  # (level, message)

    @classmethod
    def log_info(cls, message: str) -> None:
        cls.lines.append(("info", message))

    @classmethod
    def log_warn(cls, message: str) -> None:
        cls.lines.append(("warn", message))

    @classmethod
    def log_error(cls, message: str) -> None:
        cls.lines.append(("error", message))

    @classmethod
    def log_verbose(cls, message: str) -> None:
        cls.lines.append(("verbose", message))


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def triton_string_to_numpy(name: str) -> Any:
    return _NUMPY_TYPES[name]
