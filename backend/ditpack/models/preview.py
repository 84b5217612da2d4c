"""Previews: what latents show, by a linear map from their channels to colour, as a small JPEG, in milliseconds."""

from __future__ import annotations

import base64
import io
import threading

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ditpack.models.checkpoint import Checkpoint
from ditpack.models.families import load_vae_decoder
from ditpack.models.vae import VaeDecoder

_SAMPLES, _SIDE = 12, 16  # latent images that the map is fitted to, and their height and width
_LEAST_SIDE = 64  # pixels of a preview's shorter side; latents of small images are enlarged to it


class PreviewMaker:
    """Turns normalised latents [z_dim, h, w] of ``checkpoint`` into a JPEG of about their size, as base64 text.

    ``warm_up``, or else the first call, loads the VAE's decoder onto the CPU for a moment and fits the map to it, which
    takes seconds. Safe on several threads.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._map: Tensor | None = None  # fp32 [z_dim + 1, 3]

    def warm_up(self) -> Tensor:
        """The map; fitted if it is not yet."""
        with self._lock:
            if self._map is None:
                self._map = fit(load_vae_decoder(self._checkpoint, torch.device("cpu"), torch.float32))
            return self._map

    def __call__(self, latents: Tensor) -> str:
        pixels = project(latents, self.warm_up()).numpy()
        image = Image.fromarray(pixels)
        shorter = min(image.size)
        if shorter < _LEAST_SIDE:
            factor = -(-_LEAST_SIDE // shorter)
            image = image.resize((image.width * factor, image.height * factor), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "jpeg", quality=80)
        return base64.b64encode(buffer.getvalue()).decode()


def project(latents: Tensor, colours: Tensor) -> Tensor:
    """[z_dim, h, w] by ``colours`` [z_dim + 1, 3] → uint8 [h, w, 3]."""
    values = latents.float().permute(1, 2, 0) @ colours[:-1] + colours[-1]
    return values.clamp(0, 255).round().to(torch.uint8)


@torch.inference_mode()
def fit(decoder: VaeDecoder) -> Tensor:
    """The least-squares map, fp32 [z_dim + 1, 3], from a latent pixel to the mean colour of what it decodes to.

    Fitted to random latents of every roughness, from flat to noise, as no pictures are at hand here.
    """
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(_SAMPLES):
        coarse = 2 ** (index % 4 + 1)  # 2, 4, 8, 16 cells a side
        noise = torch.randn((1, decoder.z_dim, coarse, coarse), generator=generator)
        samples.append(F.interpolate(noise, size=(_SIDE, _SIDE), mode="bilinear")[0])
    images = torch.from_numpy(np.stack(decoder.decode(samples))).float().permute(0, 3, 1, 2)
    means = F.avg_pool2d(images, decoder.scale_factor).permute(0, 2, 3, 1).reshape(-1, 3)
    inputs = torch.stack(samples).permute(0, 2, 3, 1).reshape(-1, decoder.z_dim)
    inputs = torch.cat((inputs, torch.ones(len(inputs), 1)), dim=1)
    return torch.linalg.lstsq(inputs, means).solution
