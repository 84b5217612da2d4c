"""Latents to pixels, and the decoding half of AutoencoderKLQwenImage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from diffusers import AutoencoderKLQwenImage
from torch import nn

from ditpack.errors import GenerationFailed
from ditpack.models.checkpoint import Checkpoint
from ditpack.models.weights import LoadReport, load_component

log = logging.getLogger(__name__)

_BATCH_PIXELS = 4 * 1024 * 1024  # the most that one pass carries (or one image): bounds the memory of the widest layers


class VaeDecoder:
    """Decodes latents of any sizes, equal sizes together; safe to call from several threads.

    ``decode_batch``: normalised latents [B, z_dim, h, w] on ``report``'s device and in its dtype → images in -1 … 1,
    [B, 3, H, W]. It is called by one thread at a time.
    """

    def __init__(
        self, decode_batch: Callable[[torch.Tensor], torch.Tensor], z_dim: int, scale_factor: int, report: LoadReport
    ) -> None:
        self._decode_normalised = decode_batch
        self.z_dim = z_dim
        self.scale_factor = scale_factor
        self._lock = threading.Lock()  # diffusers keeps a convolution's cache on the module during a pass
        self.report = report

    def decode(self, latents: Sequence[torch.Tensor]) -> list[npt.NDArray[np.uint8]]:
        """``latents``: each [z_dim, h, w], any float dtype and device, normalised as the sampler leaves them.

        Returns one uint8 array [h * 8, w * 8, 3] a latent (8 being the VAE's scale factor), in the same order.

        Raises:
            ValueError: a latent of another shape.
            GenerationFailed: a latent that is not finite; nothing is decoded then.
        """
        for index, latent in enumerate(latents):
            if latent.dim() != 3 or latent.shape[0] != self.z_dim or 0 in latent.shape:
                raise ValueError(f"latents[{index}] has the shape {list(latent.shape)}, must be [{self.z_dim}, h, w]")
            if not bool(torch.isfinite(latent).all()):
                raise GenerationFailed("the latents are not finite; there is no picture to decode")

        images: list[npt.NDArray[np.uint8]] = [np.empty(0, dtype=np.uint8)] * len(latents)
        sizes = [
            (height * self.scale_factor, width * self.scale_factor)
            for _, height, width in map(torch.Tensor.size, latents)
        ]
        for batch in equal_batches(sizes):
            pixels = self._decode_batch(torch.stack([latents[index] for index in batch]))
            for index, image in zip(batch, pixels.cpu().numpy(), strict=True):
                images[index] = image
        return images

    @torch.inference_mode()
    def _decode_batch(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, z_dim, h, w] → uint8 [B, H, W, 3], rounded as diffusers' image processor does."""
        with self._lock:
            image = self._decode_normalised(latents.to(self.report.device, self.report.dtype))
        image = (image * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float()
        return (image * 255).round().to(torch.uint8)


def equal_batches(sizes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Places in ``sizes``, (height, width) in pixels: those of one size together, as many as a pass takes."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, size in enumerate(sizes):
        groups.setdefault(size, []).append(index)
    for (height, width), indices in groups.items():
        together = max(1, _BATCH_PIXELS // (height * width))
        for start in range(0, len(indices), together):
            yield indices[start : start + together]


def load_vae_decoder(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> VaeDecoder:
    """Load the decoder of ``checkpoint``'s VAE onto ``device`` in ``dtype``; the encoder stays in the file.

    Raises:
        CheckpointError: weights that do not fit the config.
    """
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage.from_config(checkpoint.vae_config).eval()
    vae.encoder = nn.Identity()  # diffusers counts its layers at every decode, so it cannot be None
    vae.quant_conv = nn.Identity()
    report = load_component(checkpoint, "vae", vae, device, dtype, rename=_decoder)
    log.info("%s", report)
    shape = (1, checkpoint.vae_config["z_dim"], 1, 1, 1)
    mean = torch.tensor(checkpoint.vae_config["latents_mean"]).view(shape).to(device, dtype)
    # Divided by the reciprocal, as diffusers does it: multiplying by the number itself rounds differently in bf16.
    inverse_std = 1.0 / torch.tensor(checkpoint.vae_config["latents_std"]).view(shape).to(device, dtype)

    def decode_batch(latents: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = vae.decode(latents.unsqueeze(2) / inverse_std + mean, return_dict=False)[0]
        return image[:, :, 0]

    return VaeDecoder(decode_batch, checkpoint.vae_config["z_dim"], checkpoint.vae_scale_factor, report)


def _decoder(key: str) -> str | None:
    return None if key.startswith(("encoder.", "quant_conv.")) else key
