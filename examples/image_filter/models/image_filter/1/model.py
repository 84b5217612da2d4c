"""A step between decoding and encoding that may withhold a picture. A frame to put a real classifier into."""

from __future__ import annotations

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from ditpack.tritonserver.isolation import answer_each
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.tensors import Outputs, read_array, read_bytes, text

NOTHING = np.zeros((0, 0, 3), dtype=np.uint8)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._darkest = float(config["parameters"]["darkest"]["string_value"])
        self._outputs = Outputs(config)
        self._outcomes = Outcomes(args["model_name"])

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return answer_each(requests, self._outcomes, self._answer)

    def verdict(self, pixels: np.ndarray) -> str | None:
        """None lets the picture, uint8 [H, W, 3], pass; a word withholds it and is what INFO gives as finish_reason."""
        return "too_dark" if pixels.mean() < self._darkest else None

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        pixels = read_array(request, "PIXELS")
        info = json.loads(read_bytes(request, "INFO"))
        reason = self.verdict(pixels)
        info["finish_reason"] = reason or "stop"
        values = {"PIXELS": NOTHING if reason else pixels, "INFO": text(json.dumps(info))}
        return self._outputs.response(values, request.requested_output_names())
