"""``vae_decoder``: latents to the image that the client asked for, off the denoising loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ditpack.errors import InvalidRequest
from ditpack.request import Request, resolve_json
from ditpack.tritonserver.images import encode_image
from ditpack.tritonserver.isolation import answer_together, check_deadline
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.metrics import DecoderMetrics
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.parameters import Instance, VaeDecoderSettings
from ditpack.tritonserver.tensors import Array, Outputs, read_array, read_bytes, text

if TYPE_CHECKING:
    from ditpack.models.vae import VaeDecoder

_NO_PIXELS = np.zeros((0, 0, 3), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class _Item:
    request_id: str
    request: Request
    latents: Array  # fp32 [z_dim, h, w]
    info: dict[str, Any]
    requested: Sequence[str]


class VaeDecoderDoor:
    def __init__(
        self,
        decoder: VaeDecoder,
        resolve: Callable[[bytes], Request],
        outputs: Outputs,
        outcomes: Outcomes,
        metrics: DecoderMetrics,
    ) -> None:
        self._decoder = decoder
        self._resolve = resolve
        self._outputs = outputs
        self._outcomes = outcomes
        self._metrics = metrics
        self._encoders = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "ditpack-encode")  # Pillow drops the GIL

    @classmethod
    def load(cls, args: Mapping[str, str]) -> VaeDecoderDoor:
        """Load the VAE of the configured checkpoint onto the instance's device.

        Raises:
            ParameterError, CheckpointError: it cannot be served as configured.
        """
        route_logs()
        instance = Instance.from_args(args)
        settings = instance.settings(VaeDecoderSettings)
        device, dtype = instance.torch_target(settings.dtype)

        from ditpack.models.checkpoint import open_checkpoint
        from ditpack.models.families import FAMILIES, load_vae_decoder

        checkpoint = open_checkpoint(settings.checkpoint, settings.weights)
        return cls(
            load_vae_decoder(checkpoint, device, dtype),
            partial(
                resolve_json,
                limits=checkpoint.limits(settings.max_pixels),
                resolver=FAMILIES[checkpoint.family].resolver,
            ),
            Outputs(instance.config),
            Outcomes(instance.model),
            DecoderMetrics(),
        )

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        arrived_ns = time.monotonic_ns()
        return answer_together(
            requests,
            self._outcomes,
            read=self._read,
            run=self._run,
            write=lambda item, made: self._write(item, made, arrived_ns),
        )

    def finalize(self) -> None:
        self._encoders.shutdown()

    def _read(self, request: pb_utils.InferenceRequest) -> _Item:
        resolved = self._resolve(read_bytes(request, "REQUEST"))
        check_deadline(resolved, "decoding")
        latents = read_array(request, "LATENTS")
        factor = self._decoder.scale_factor
        expected = (self._decoder.z_dim, resolved.height // factor, resolved.width // factor)
        if latents.shape != expected:
            raise InvalidRequest("LATENTS", list(latents.shape), f"must have shape {list(expected)} for this request")
        if not np.isfinite(latents).all():
            raise InvalidRequest("LATENTS", latents[~np.isfinite(latents)][0].item(), "must be finite")
        return _Item(request.request_id(), resolved, latents, _read_info(request), request.requested_output_names())

    def _run(self, items: list[_Item]) -> list[tuple[Array, bytes]]:
        """Each item's pixels, and its image file where one is wanted."""
        import torch

        pixels = self._decoder.decode([torch.from_numpy(item.latents) for item in items])
        return list(zip(pixels, self._encoders.map(_encode, items, pixels), strict=True))

    def _write(self, item: _Item, made: tuple[Array, bytes], arrived_ns: int) -> pb_utils.InferenceResponse:
        pixels, image = made
        now = time.monotonic_ns()
        decode_ms, total_ms = (now - arrived_ns) / 1e6, (now - item.request.accepted_ns) / 1e6
        item.info["decode_ms"] = round(decode_ms, 3)
        values = {
            "IMAGE": text(image),
            # An ensemble with a step behind this one maps PIXELS and no IMAGE; then they are what it goes on with.
            "PIXELS": pixels if item.request.output_format == "raw" or "IMAGE" not in item.requested else _NO_PIXELS,
            "INFO": text(json.dumps(item.info)),
        }
        response = self._outputs.response(values, item.requested)
        self._metrics.decoded(decode_ms / 1000, total_ms / 1000)
        self._outcomes.success(
            item.request_id,
            width=item.request.width,
            height=item.request.height,
            steps=item.request.num_inference_steps,
            total_ms=round(total_ms, 3),
            **{name: value for name, value in item.info.items() if name.endswith("_ms")},
        )
        return response


def _read_info(request: pb_utils.InferenceRequest) -> dict[str, Any]:
    value = read_bytes(request, "INFO")
    try:
        info = json.loads(value)
    except (ValueError, RecursionError):
        info = None
    if not isinstance(info, dict):
        raise InvalidRequest("INFO", value, "must be the JSON object that the model 'dit' writes")
    return info


def _encode(item: _Item, pixels: Array) -> bytes:
    if item.request.output_format == "raw" or "IMAGE" not in item.requested:
        return b""
    return encode_image(pixels, item.request.output_format, item.request.response_format)
