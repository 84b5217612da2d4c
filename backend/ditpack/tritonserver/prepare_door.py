"""``prepare``: the resolver's door. Fills in defaults, validates everything, draws the seed, tokenises. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import triton_python_backend_utils as pb_utils

from ditpack.request import DEFAULT_NEGATIVE_PROMPT, FIELDS, Limits, resolve
from ditpack.tritonserver.isolation import answer_each
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.parameters import Instance, PrepareSettings
from ditpack.tritonserver.tensors import Outputs, read_scalar, text

if TYPE_CHECKING:
    from ditpack.models.prompt import PromptTokenizer


class PrepareDoor:
    def __init__(self, tokenizer: PromptTokenizer, limits: Limits, outputs: Outputs, outcomes: Outcomes) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._outputs = outputs
        self._outcomes = outcomes

    @classmethod
    def load(cls, args: Mapping[str, str]) -> PrepareDoor:
        """Open the checkpoint that the instance is configured for.

        Raises:
            ParameterError, CheckpointError: it cannot be served as configured.
        """
        from ditpack.models.checkpoint import open_checkpoint
        from ditpack.models.prompt import PromptTokenizer

        route_logs()
        instance = Instance.from_args(args)
        settings = instance.settings(PrepareSettings)
        checkpoint = open_checkpoint(settings.checkpoint, weights="random")  # it reads none
        tokenizer = PromptTokenizer(checkpoint, settings.max_prompt_tokens)
        limits = checkpoint.limits(settings.max_pixels)
        return cls(tokenizer, limits, Outputs(instance.config), Outcomes(instance.model))

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return answer_each(requests, self._outcomes, self._prepare)

    def _prepare(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        resolved = resolve({field: read_scalar(request, field) for field in FIELDS}, self._limits)
        input_ids = self._tokenizer.encode(resolved.prompt)
        # Without guidance dit ignores these; the usual negative prompt costs nothing, the encoder's cache has it.
        negative = resolved.negative_prompt if resolved.negative_prompt is not None else DEFAULT_NEGATIVE_PROMPT
        negative_ids = self._tokenizer.encode(negative, "NEGATIVE_PROMPT")
        values = {
            "REQUEST": text(resolved.to_json()),
            "INPUT_IDS": np.array(input_ids, dtype=np.int64),
            "NEGATIVE_INPUT_IDS": np.array(negative_ids, dtype=np.int64),
            "SEED": np.array([resolved.seed], dtype=np.int64),
        }
        self._outcomes.accepted(request.request_id(), resolved.prompt, resolved.negative_prompt)
        return self._outputs.response(values, request.requested_output_names())
