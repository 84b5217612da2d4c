"""Triton's ``/generate_stream``: JSON in, server-sent events out."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

MEDIA_TYPE = "text/event-stream"


class JsonTensors:
    """One event's outputs, which are scalars here and base64 for files, as tritonclient's answers give them."""

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self._outputs = outputs

    def as_numpy(self, name: str) -> np.ndarray[Any, Any] | None:
        value = self._outputs.get(name)
        if value is None:
            return None
        if name == "IMAGE":
            value = base64.b64decode(value)
        return np.array([value], dtype=np.object_ if isinstance(value, str | bytes) else None)


def request_body(inputs: Mapping[str, tuple[str, np.ndarray[Any, Any]]], request_id: str) -> bytes:
    """``inputs``: name → (Triton data type, array of shape [1]). Files come back as base64."""
    values = {name: array.item() for name, (_, array) in inputs.items()}
    texts = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
    return json.dumps({"id": request_id, "RESPONSE_FORMAT": "b64_json", **texts}).encode()


class Parser:
    """Bytes as they arrive, whole events out. A line may be megabytes long: an image is one."""

    def __init__(self) -> None:
        self._line = bytearray()

    def feed(self, received: bytes) -> Iterator[JsonTensors]:
        """The events that ``received`` completes.

        Raises:
            InferenceServerException: for an error event; it has no status, as Triton sends none.
        """
        *ends, rest = received.split(b"\n")
        for end in ends:
            self._line += end
            line = bytes(self._line)
            self._line.clear()
            if line.startswith(b"data:"):
                yield _event(line.removeprefix(b"data:"))
        self._line += rest


def _event(data: bytes) -> JsonTensors:
    try:
        outputs = json.loads(data)
    except ValueError:
        raise InferenceServerException("the server's stream is no JSON") from None
    if not isinstance(outputs, dict):
        raise InferenceServerException("the server's stream has no JSON objects")
    if "error" in outputs:
        raise InferenceServerException(str(outputs["error"]))
    return JsonTensors(outputs)
