"""``prepare_edit``: ``prepare`` for requests with images to edit, which it decodes and resizes too. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import triton_python_backend_utils as pb_utils

from ditpack.request import DEFAULT_NEGATIVE_PROMPT, FIELDS, Limits, resolve
from ditpack.tritonserver.isolation import answer_each
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.parameters import Instance, PrepareEditSettings
from ditpack.tritonserver.pixels import write_pixels
from ditpack.tritonserver.tensors import Outputs, read_scalar, read_strings, text

if TYPE_CHECKING:
    from ditpack.models.prompt import PromptTokenizer
    from ditpack.reference_images import ImagePreparer


class PrepareEditDoor:
    def __init__(
        self, tokenizer: PromptTokenizer, images: ImagePreparer, limits: Limits, outputs: Outputs, outcomes: Outcomes
    ) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._limits = limits
        self._outputs = outputs
        self._outcomes = outcomes
        self._decoders = ThreadPoolExecutor(limits.max_references, "ditpack-decode")  # Pillow drops the GIL

    @classmethod
    def load(cls, args: Mapping[str, str]) -> PrepareEditDoor:
        """Open the checkpoint that the instance is configured for.

        Raises:
            ParameterError, CheckpointError: it cannot be served as configured, or cannot edit images.
        """
        from ditpack.models.checkpoint import open_checkpoint
        from ditpack.models.prompt import PromptTokenizer
        from ditpack.reference_images import ImagePreparer

        route_logs()
        instance = Instance.from_args(args)
        settings = instance.settings(PrepareEditSettings)
        checkpoint = open_checkpoint(settings.checkpoint, weights="random")  # it reads none
        return cls(
            PromptTokenizer(checkpoint, settings.max_prompt_tokens),
            ImagePreparer(checkpoint, settings.max_image_bytes, settings.max_image_pixels),
            checkpoint.limits(settings.max_pixels),
            Outputs(instance.config),
            Outcomes(instance.model),
        )

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return answer_each(requests, self._outcomes, self._prepare)

    def finalize(self) -> None:
        self._decoders.shutdown()

    def _prepare(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        values = {field: read_scalar(request, field) for field in FIELDS}
        files = read_strings(request, "IMAGES")
        accepted_ns = resolve(values, self._limits).accepted_ns  # refuses what is cheap to refuse before any decoding
        self._images.check_count(len(files))
        images = list(self._decoders.map(self._images.prepare, files, range(1, len(files) + 1)))

        values["REFERENCES"] = [dataclasses.asdict(image.about) for image in images]
        resolved = dataclasses.replace(resolve(values, self._limits), accepted_ns=accepted_ns)
        image_tokens = [self._images.tokens(image) for image in images]
        input_ids = self._tokenizer.encode(resolved.prompt, "PROMPT", image_tokens)
        if resolved.negative_prompt is not None:
            negative_ids = self._tokenizer.encode(resolved.negative_prompt, "NEGATIVE_PROMPT", image_tokens)
        else:  # dit ignores these, and without images they cost next to nothing
            negative_ids = self._tokenizer.encode(DEFAULT_NEGATIVE_PROMPT)
        condition_pixels, condition_sizes = write_pixels([image.condition for image in images])
        reference_pixels, reference_sizes = write_pixels([image.reference for image in images])
        outputs = {
            "REQUEST": text(resolved.to_json()),
            "INPUT_IDS": np.array(input_ids, dtype=np.int64),
            "NEGATIVE_INPUT_IDS": np.array(negative_ids, dtype=np.int64),
            "SEED": np.array([resolved.seed], dtype=np.int64),
            "CONDITION_PIXELS": condition_pixels,
            "CONDITION_SIZES": condition_sizes,
            "REFERENCE_PIXELS": reference_pixels,
            "REFERENCE_SIZES": reference_sizes,
        }
        self._outcomes.accepted(request.request_id(), resolved.prompt, resolved.negative_prompt)
        return self._outputs.response(outputs, request.requested_output_names())
