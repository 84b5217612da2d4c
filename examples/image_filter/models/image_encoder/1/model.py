"""Pixels to image files, by the same code as in vae_decoder."""

from __future__ import annotations

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from ditpack.tritonserver.images import encode_image
from ditpack.tritonserver.isolation import answer_each
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.tensors import Outputs, read_array, read_bytes, text

NOTHING = np.zeros((0, 0, 3), dtype=np.uint8)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._outputs = Outputs(json.loads(args["model_config"]))
        self._outcomes = Outcomes(args["model_name"])

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return answer_each(requests, self._outcomes, self._answer)

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        resolved = json.loads(read_bytes(request, "REQUEST"))
        pixels = read_array(request, "PIXELS")
        requested = request.requested_output_names()
        raw = resolved["output_format"] == "raw"
        image = b""
        if pixels.size and not raw and "IMAGE" in requested:
            image = encode_image(pixels, resolved["output_format"], resolved["response_format"])
        values = {"IMAGE": text(image), "PIXELS": pixels if raw else NOTHING}
        return self._outputs.response(values, requested)
