"""Latents: seeded noise, and the way between a latent image and its tokens.

Source: ``QwenImagePipeline.prepare_latents``, ``_pack_latents``, ``_unpack_latents``; the rearrangements of
MammothModa2's ``Transformer2DModel`` (patch size 2 in both).
"""

from __future__ import annotations

import torch
from torch import Tensor


def seeded_noise(
    seed: int, channels: int, grid: tuple[int, int], dtype: torch.dtype, channel_last: bool = False
) -> Tensor:
    """Noise tokens [h·w, 4·channels] of a patch grid (h, w), drawn on the CPU from a generator of their own.

    Drawn in ``dtype`` as the reference does, so a seed means the same picture there and here, on any device.
    """
    height, width = grid
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn((1, 1, channels, 2 * height, 2 * width), generator=generator, dtype=dtype)
    return pack_latents(noise[0, 0], channel_last)


def pack_latents(latents: Tensor, channel_last: bool = False) -> Tensor:
    """A latent image [C, 2h, 2w] → tokens [h·w, 4C], row-major.

    Inside a token the channel is slowest (Qwen-Image) or, with ``channel_last``, fastest (MammothModa2).
    """
    channels, height, width = latents.shape
    patches = latents.reshape(channels, height // 2, 2, width // 2, 2)
    patches = patches.permute(1, 3, 2, 4, 0) if channel_last else patches.permute(1, 3, 0, 2, 4)
    return patches.reshape(height // 2 * (width // 2), 4 * channels)


def unpack_latents(tokens: Tensor, grid: tuple[int, int], channel_last: bool = False) -> Tensor:
    """Tokens [h·w, 4C] of a grid (h, w) → the latent image [C, 2h, 2w]."""
    height, width = grid
    channels = tokens.shape[-1] // 4
    if channel_last:
        patches = tokens.reshape(height, width, 2, 2, channels).permute(4, 0, 2, 1, 3)
    else:
        patches = tokens.reshape(height, width, channels, 2, 2).permute(2, 0, 3, 1, 4)
    return patches.reshape(channels, 2 * height, 2 * width)
