"""``vae_encoder``: the pixels of reference images to the tokens that ``dit`` reads, before the denoising loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from ditpack.errors import InvalidRequest
from ditpack.tritonserver.answer_cache import AnswerCache
from ditpack.tritonserver.isolation import answer_together
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.metrics import CacheMetrics
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.parameters import Instance, VaeEncoderSettings
from ditpack.tritonserver.pixels import read_pixels
from ditpack.tritonserver.tensors import Array, Outputs

if TYPE_CHECKING:
    from ditpack.models.vae_encoder import VaeEncoder

_Item = tuple[list[Array], Sequence[str]]  # images, outputs asked for


class VaeEncoderDoor:
    def __init__(self, encoder: VaeEncoder, outputs: Outputs, outcomes: Outcomes, cache: AnswerCache) -> None:
        self._encoder = encoder
        self._outputs = outputs
        self._outcomes = outcomes
        self._cache = cache

    @classmethod
    def load(cls, args: Mapping[str, str]) -> VaeEncoderDoor:
        """Load the VAE of the configured checkpoint onto the instance's device.

        Raises:
            ParameterError, CheckpointError: it cannot be served as configured.
        """
        route_logs()
        instance = Instance.from_args(args)
        settings = instance.settings(VaeEncoderSettings)
        device, dtype = instance.torch_target(settings.dtype)

        from ditpack.models.checkpoint import open_checkpoint
        from ditpack.models.vae_encoder import load_vae_encoder

        encoder = load_vae_encoder(open_checkpoint(settings.checkpoint, settings.weights), device, dtype)
        cache = AnswerCache(int(settings.cache_mib * 2**20), CacheMetrics(instance.model))
        return cls(encoder, Outputs(instance.config), Outcomes(instance.model), cache)

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return answer_together(requests, self._outcomes, read=_read, run=self._run, write=self._write)

    def _run(self, items: list[_Item]) -> list[Array]:
        return self._cache.answer(items, lambda item: item[0], self._encode)

    def _encode(self, items: list[_Item]) -> list[Array]:
        """The tokens of each item's images; images of one size are encoded together, whosever they are."""
        import torch

        tokens = iter(self._encoder.encode([image for images, _ in items for image in images]))
        return [torch.cat([next(tokens) for _ in images]).numpy() for images, _ in items]

    def _write(self, item: _Item, latents: Array) -> pb_utils.InferenceResponse:
        return self._outputs.response({"LATENTS": latents}, item[1])


def _read(request: pb_utils.InferenceRequest) -> _Item:
    images = read_pixels(request)
    if not images:
        raise InvalidRequest("PIXELS", None, "are required")
    return images, request.requested_output_names()
