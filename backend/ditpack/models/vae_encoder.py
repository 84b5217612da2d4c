"""The encoding half of AutoencoderKLQwenImage: pixels of reference images to the tokens that the transformer reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor, nn

from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import Checkpoint
from ditpack.models.vae import equal_batches
from ditpack.models.vision import Pixels
from ditpack.models.weights import LoadReport, load_component
from ditpack.sampling.latents import pack_latents

log = logging.getLogger(__name__)


class VaeEncoder:
    """Encodes images of any sizes, equal sizes together; safe to call from several threads."""

    def __init__(self, vae: Any, checkpoint: Checkpoint, report: LoadReport) -> None:
        self._vae = vae
        self._multiple = 2 * checkpoint.vae_scale_factor
        self._mean, self._std = (
            torch.tensor(checkpoint.vae_config[name]).view(1, -1, 1, 1, 1).to(report.device, report.dtype)
            for name in ("latents_mean", "latents_std")
        )
        self._lock = threading.Lock()  # diffusers keeps the convolutions' cache on the module during a pass
        self.report = report

    def encode(self, images: Sequence[Pixels]) -> list[Tensor]:
        """``images``: uint8 [H, W, 3] each, sides multiples of 16 (twice the VAE's scale factor).

        Returns one fp32 CPU tensor [H/16 · W/16, 4 · z_dim] an image, in the same order: the posterior's mode,
        normalised, as tokens. Source: ``QwenImageEditPlusPipeline.prepare_latents``.

        Raises:
            InvalidRequest: a side that is no such multiple.
        """
        for image in images:
            height, width = image.shape[:2]
            if not height or not width or height % self._multiple or width % self._multiple:
                raise InvalidRequest("SIZES", [height, width], f"must be positive multiples of {self._multiple}")

        tokens: list[Tensor] = [torch.empty(0)] * len(images)
        for batch in equal_batches([(image.shape[0], image.shape[1]) for image in images]):
            latents = self._encode_batch(torch.stack([torch.from_numpy(images[index]) for index in batch]))
            for index, latent in zip(batch, latents, strict=True):
                tokens[index] = pack_latents(latent)
        return tokens

    @torch.inference_mode()
    def _encode_batch(self, pixels: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] → fp32 [B, z_dim, h, w] on the CPU."""
        image = (2 * (pixels.to(self.report.device).float() / 255) - 1).to(self.report.dtype)
        with self._lock:
            mode = self._vae.encode(image.permute(0, 3, 1, 2).unsqueeze(2)).latent_dist.mode()
        normalised: Tensor = (mode - self._mean) / self._std
        return normalised[:, :, 0].float().cpu()


def load_vae_encoder(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> VaeEncoder:
    """Load the encoder of ``checkpoint``'s VAE onto ``device`` in ``dtype``; the decoder stays in the file.

    Raises:
        CheckpointError: weights that do not fit the config.
    """
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage.from_config(checkpoint.vae_config).eval()
    vae.decoder = nn.Identity()  # diffusers counts its layers at every pass, so it cannot be None
    vae.post_quant_conv = nn.Identity()
    report = load_component(checkpoint, "vae", vae, device, dtype, rename=_encoder)
    log.info("%s", report)
    return VaeEncoder(vae, checkpoint, report)


def _encoder(key: str) -> str | None:
    return None if key.startswith(("decoder.", "post_quant_conv.")) else key
