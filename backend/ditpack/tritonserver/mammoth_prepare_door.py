"""``mammoth_prepare``: checks and resolves a request and picks the states that condition its image. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ditpack.errors import InvalidRequest
from ditpack.models.config_rules import Config
from ditpack.models.mammoth_conditions import split_conditions
from ditpack.models.mammoth_config import MammothModa2Config
from ditpack.models.mammoth_request import FIELDS, resolve
from ditpack.request import Limits
from ditpack.tritonserver.isolation import answer_each
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.parameters import Instance, MammothPrepareSettings
from ditpack.tritonserver.tensors import Outputs, read_array, read_scalar, text


class MammothPrepareDoor:
    def __init__(self, config: MammothModa2Config, limits: Limits, outputs: Outputs, outcomes: Outcomes) -> None:
        self._config = config
        self._limits = limits
        self._outputs = outputs
        self._outcomes = outcomes

    @classmethod
    def load(cls, args: Mapping[str, str]) -> MammothPrepareDoor:
        """Open the checkpoint that the instance is configured for.

        Raises:
            ParameterError, CheckpointError: it cannot be served as configured.
        """
        from ditpack.models.checkpoint import open_checkpoint

        route_logs()
        instance = Instance.from_args(args)
        settings = instance.settings(MammothPrepareSettings)
        checkpoint = open_checkpoint(settings.checkpoint, weights="random")  # it reads none
        config = MammothModa2Config.read(Config(checkpoint.path / "config.json", checkpoint.transformer_config))
        limits = checkpoint.limits(settings.max_pixels)
        return cls(config, limits, Outputs(instance.config), Outcomes(instance.model))

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return answer_each(requests, self._outcomes, self._prepare)

    def _prepare(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        resolved = resolve({field: _setting(request, field) for field in FIELDS}, self._limits)
        answer_start = read_scalar(request, "ANSWER_START")
        if answer_start is None:
            raise InvalidRequest("ANSWER_START", None, "is required")
        conditions, text_tokens = split_conditions(
            read_array(request, "HIDDEN_STATES"), read_array(request, "TOKEN_IDS"), answer_start, self._config
        )
        values = {
            "REQUEST": text(resolved.to_json()),
            "CONDITIONS": conditions,
            "TEXT_TOKENS": np.array([text_tokens], dtype=np.int32),
            "SEED": np.array([resolved.seed], dtype=np.int64),
        }
        return self._outputs.response(values, request.requested_output_names())


def _setting(request: pb_utils.InferenceRequest, field: str) -> Any:
    if field != "CFG_RANGE":
        return read_scalar(request, field)
    sent = pb_utils.get_input_tensor_by_name(request, field) is not None
    return read_array(request, field).tolist() if sent else None
