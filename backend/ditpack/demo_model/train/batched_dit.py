"""The Qwen-Image transformer over dense batches, for training: diffusers' modules, one shape, padding in the text only.

The mathematics is that of ``models.qwen_image``, which serves what is trained here; this form has gradients, and no
complex numbers, so that a compiler can fuse it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ditpack.models.ops import EPS
from ditpack.models.qwen_image import text_start
from ditpack.models.rotary import Rotary


@dataclass(frozen=True, slots=True)
class DitLayout:
    """Rotary tables of a shape, fp32 [tokens, head_dim / 2] each: of L text tokens and of all image tokens."""

    text_cos: Tensor
    text_sin: Tensor
    image_cos: Tensor
    image_sin: Tensor


def dit_layout(
    axes: tuple[int, ...], grids: Sequence[tuple[int, int]], text_tokens: int, device: torch.device
) -> DitLayout:
    """For patch ``grids`` (height, width), the target's first."""
    places = []
    for frame, (height, width) in enumerate(grids):
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centred = (torch.full_like(rows, frame), rows - (height - height // 2), columns - (width - width // 2))
        places.append(torch.stack([part.flatten() for part in centred], dim=1))
    text = (text_start(tuple(grids)) + torch.arange(text_tokens))[:, None].expand(-1, 3)
    tables = (Rotary.from_positions(text, axes), Rotary.from_positions(torch.cat(places), axes))
    return DitLayout(*(part.to(device) for table in tables for part in (table.cos, table.sin)))


def dual_block(
    block: Any, x: Tensor, y: Tensor, temb: Tensor, mask: Tensor, layout: DitLayout
) -> tuple[Tensor, Tensor]:
    """One block over both streams, image [B, S, D] and text [B, L, D]; ``mask`` is bool [B, 1, 1, L + S]."""
    x_mod, y_mod = (mod[1](temb).unflatten(-1, (6, -1)).unbind(1) for mod in (block.img_mod, block.txt_mod))
    x_out, y_out = _attend(block.attn, _modulate(x, *x_mod[:2]), _modulate(y, *y_mod[:2]), mask, layout)
    x, y = x + x_mod[2][:, None] * x_out, y + y_mod[2][:, None] * y_out
    x = x + x_mod[5][:, None] * _mlp(block.img_mlp, _modulate(x, *x_mod[3:5]))
    return x, y + y_mod[5][:, None] * _mlp(block.txt_mlp, _modulate(y, *y_mod[3:5]))


def velocity(
    dit: Any,
    image: Tensor,
    text: Tensor,
    keep: Tensor,
    sigmas: Tensor,
    layout: DitLayout,
    run_block: Callable[..., tuple[Tensor, Tensor]] = dual_block,
) -> Tensor:
    """What ``dit``, a ``QwenImageTransformer2DModel``, predicts for every image token.

    ``image`` [B, S, in_channels], the target's tokens and then those of its references; ``text`` [B, L, width], of
    which each row attends to the first ``keep`` [B]; ``sigmas`` [B]. ``run_block``: ``dual_block``, maybe compiled.
    """
    temb = F.silu(dit.time_text_embed.timestep_embedder(_sinusoid(sigmas).to(image.dtype)))
    text_tokens = text.shape[1]
    place = torch.arange(text_tokens + image.shape[1], device=image.device)
    mask = ((place < keep[:, None]) | (place >= text_tokens))[:, None, None, :]
    # Copies: a compiler would make one thing of a block on views, as linear layers leave them, and one of the others.
    x, y = dit.img_in(image).clone(), dit.txt_in(_rms(text, dit.txt_norm.weight)).clone()
    for block in dit.transformer_blocks:
        x, y = run_block(block, x, y, temb, mask, layout)
    scale, shift = dit.norm_out.linear(temb).chunk(2, dim=-1)
    return dit.proj_out(_modulate(x, shift, scale))


def _attend(attn: Any, x: Tensor, y: Tensor, mask: Tensor, layout: DitLayout) -> tuple[Tensor, Tensor]:
    """Joint attention, text first."""
    heads = attn.heads

    def split(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (heads, -1)).transpose(1, 2)

    image_q, image_k = (
        _rotate(_rms(split(project(x)), norm.weight), layout.image_cos, layout.image_sin)
        for project, norm in ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k))
    )
    text_q, text_k = (
        _rotate(_rms(split(project(y)), norm.weight), layout.text_cos, layout.text_sin)
        for project, norm in ((attn.add_q_proj, attn.norm_added_q), (attn.add_k_proj, attn.norm_added_k))
    )
    q, k = torch.cat((text_q, image_q), dim=2), torch.cat((text_k, image_k), dim=2)
    v = torch.cat((split(attn.add_v_proj(y)), split(attn.to_v(x))), dim=2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
    text_out, image_out = out.split((y.shape[1], x.shape[1]), dim=1)
    return attn.to_out[0](image_out), attn.to_add_out(text_out)


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    return mlp.net[2](F.gelu(mlp.net[0].proj(x), approximate="tanh"))


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=EPS).to(scale.dtype)
    return normed * (1 + scale[:, None]) + shift[:, None]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), EPS).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channels of [B, heads, tokens, head_dim] against each other, in fp32."""
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2).to(x.dtype)


def _sinusoid(sigmas: Tensor) -> Tensor:
    """[B] → fp32 [B, 256], cosines first, of 1000 · sigma."""
    exponents = torch.arange(128, dtype=torch.float32, device=sigmas.device) * (-math.log(10000) / 128)
    angles = 1000 * sigmas[:, None].float() * exponents.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
