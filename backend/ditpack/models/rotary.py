"""Rotary position embedding from explicit three-axis positions: tokens bring their positions, shapes play no part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines of each token's rotation, fp32 [tokens, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def from_positions(
        cls,
        positions: Tensor,
        axes_dims: Sequence[int],
        theta: float = 10000.0,
        dtype: torch.dtype = torch.float32,
    ) -> Rotary:
        """Tables for int64 ``positions`` [tokens, axes]; axis i rotates ``axes_dims[i]`` of the head's dimensions.

        Source: diffusers ``QwenEmbedRope.rope_params`` (angles position · theta^(-2j/dim), there in fp32). ``dtype`` is
        that of the angles, as the model was trained with.
        """
        angles = []
        for axis, dim in enumerate(axes_dims):
            exponents = torch.arange(0, dim, 2, dtype=dtype).div(dim)
            frequencies = (1.0 / torch.pow(theta, exponents)).to(positions.device)
            angles.append(torch.outer(positions[:, axis].to(dtype), frequencies))
        angle = torch.cat(angles, dim=1)
        return cls(angle.cos().float(), angle.sin().float())


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate ``x`` [tokens, heads, head_dim] in interleaved pairs (2j, 2j+1), in fp32; the result has ``x``'s dtype."""
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = rotary.cos.unsqueeze(1), rotary.sin.unsqueeze(1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
