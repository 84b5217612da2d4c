"""``text_encoder``: all prompts of one ``execute`` in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from ditpack.tritonserver.answer_cache import AnswerCache
from ditpack.tritonserver.isolation import answer_together
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.metrics import CacheMetrics
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.parameters import Instance, TextEncoderSettings
from ditpack.tritonserver.pixels import read_pixels
from ditpack.tritonserver.tensors import Array, Outputs, read_array

if TYPE_CHECKING:
    from ditpack.models.text_encoder import TextEncoder


@dataclass(frozen=True, slots=True)
class _Item:
    input_ids: Array  # int64 [tokens]
    images: list[Array]
    requested: Sequence[str]


class TextEncoderDoor:
    def __init__(self, encoder: TextEncoder, outputs: Outputs, outcomes: Outcomes, cache: AnswerCache) -> None:
        self._encoder = encoder
        self._outputs = outputs
        self._outcomes = outcomes
        self._cache = cache

    @classmethod
    def load(cls, args: Mapping[str, str]) -> TextEncoderDoor:
        """Load the text encoder of the configured checkpoint onto the instance's device.

        Raises:
            ParameterError, CheckpointError: it cannot be served as configured.
        """
        route_logs()
        instance = Instance.from_args(args)
        settings = instance.settings(TextEncoderSettings)
        device, dtype = instance.torch_target(settings.dtype)

        from ditpack.models.checkpoint import open_checkpoint
        from ditpack.models.text_encoder import load_text_encoder

        encoder = load_text_encoder(open_checkpoint(settings.checkpoint, settings.weights), device, dtype)
        cache = AnswerCache(int(settings.cache_mib * 2**20), CacheMetrics(instance.model))
        return cls(encoder, Outputs(instance.config), Outcomes(instance.model), cache)

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return answer_together(requests, self._outcomes, read=_read, run=self._run, write=self._write)

    def _run(self, items: list[_Item]) -> list[Array]:
        return self._cache.answer(items, lambda item: (item.input_ids, *item.images), self._encode)

    def _encode(self, items: list[_Item]) -> list[Array]:
        embeds = self._encoder.encode([item.input_ids.tolist() for item in items], [item.images for item in items])
        return [row.numpy() for row in embeds]

    def _write(self, item: _Item, embeds: Array) -> pb_utils.InferenceResponse:
        return self._outputs.response({"EMBEDS": embeds}, item.requested)


def _read(request: pb_utils.InferenceRequest) -> _Item:
    return _Item(read_array(request, "INPUT_IDS"), read_pixels(request), request.requested_output_names())
