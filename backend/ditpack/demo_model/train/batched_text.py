"""Qwen2.5-VL's language model and vision tower over dense batches, for training: the same mathematics and modules.

All rows of a batch have the same shape: the template, then pictures of one size, then an instruction padded on the
right. Attention is causal, so the padding needs no mask, and what all rows begin with is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ditpack.models.vision import multimodal_positions


@dataclass(frozen=True, slots=True)
class TextLayout:
    """What the rows of a batch share. ``prefix`` int64 [P]: the ids that are dropped again; behind it come L ids.

    ``pictures`` int64 [n]: where in these L the tokens of pictures are. ``cos`` and ``sin`` are fp32 [P + L, head_dim].
    """

    prefix: Tensor
    pictures: Tensor
    cos: Tensor
    sin: Tensor


def text_layout(
    config: Any, ids: Sequence[int], drop: int, runs: Sequence[slice], grids: Sequence[tuple[int, int]], device: Any
) -> TextLayout:
    """Of rows as ``ids`` [P + L], with pictures of ``grids`` (width, height) in tokens at ``runs``."""
    positions = multimodal_positions(len(ids), runs, grids)
    head_dim = config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    # Each part of the frequencies follows its own axis: time, height, width.
    axes = torch.arange(3).repeat_interleave(torch.tensor(config.rope_parameters["mrope_section"]))
    angles = (positions.float()[axes] * frequencies[:, None]).T.repeat(1, 2)
    places = [place - drop for run in runs for place in range(run.start, run.stop)]
    return TextLayout(
        prefix=torch.tensor(ids[:drop], device=device),
        pictures=torch.tensor(places, dtype=torch.int64, device=device),
        cos=angles.cos().to(device),
        sin=angles.sin().to(device),
    )


def text_layer(layer: Any, prefix: Tensor, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """One layer over what all rows begin with, [1, P, width], and over the rows [B, L, width]; ``mask`` [L, P + L]."""
    before = prefix.shape[1]
    queries, keys, values = _heads(layer, prefix, cos[:before], sin[:before])
    ours, own_keys, own_values = _heads(layer, x, cos[before:], sin[before:])
    attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    prefix = _finish(layer, prefix, attended)
    own_keys = torch.cat((keys.expand(len(x), -1, -1, -1), own_keys), dim=2)
    own_values = torch.cat((values.expand(len(x), -1, -1, -1), own_values), dim=2)
    return prefix, _finish(layer, x, F.scaled_dot_product_attention(ours, own_keys, own_values, attn_mask=mask))


def encode_text(
    model: Any,
    ids: Tensor,
    layout: TextLayout,
    features: Tensor | None,
    run_layer: Callable[..., tuple[Tensor, Tensor]] = text_layer,
) -> Tensor:
    """``ids`` int64 [B, L], ``features`` [B, n, width] of the pictures → hidden states [B, L, width].

    ``model`` is a ``Qwen2_5_VLTextModel``. Equals ``TextEncoder.encode`` on each row's real tokens. ``run_layer``:
    ``text_layer``, maybe compiled.
    """
    x = model.embed_tokens(ids)
    if features is not None:
        x = x.index_copy(1, layout.pictures, features.to(x.dtype))
    prefix = model.embed_tokens(layout.prefix)[None].clone()  # no view, as for the layers that follow
    before, length = prefix.shape[1], x.shape[1]
    place = torch.arange(before + length, device=x.device)
    mask = place[None, :] <= place[before:, None]
    for layer in model.layers:
        prefix, x = run_layer(layer, prefix, x, layout.cos, layout.sin, mask)
    return rms(x, model.norm)


def _heads(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, [B, heads, L, head_dim] each; shared key-value heads are repeated."""
    attention, normed = layer.self_attn, rms(x, layer.input_layernorm)
    shape = (*x.shape[:2], -1, attention.head_dim)
    q, k, v = (
        project(normed).view(shape).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    repeat = attention.num_key_value_groups
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)


def _finish(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return x + _mlp(layer.mlp, rms(x, layer.post_attention_layernorm))


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def encode_pictures(tower: Any, patches: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``patches`` [N, n, 3 · patch_size²] of N pictures, as ``vision.patchify`` orders them → [N, tokens, text width].

    ``tower`` is a ``Qwen2_5_VisionTransformerPretrainedModel`` that attends to whole pictures in every block; ``cos``
    and ``sin`` are those of ``picture_rotary``.
    """
    x = F.linear(patches, tower.patch_embed.proj.weight.flatten(1))
    for block in tower.blocks:
        attention = block.attn
        qkv = attention.qkv(rms(x, block.norm1)).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + attention.proj(attended.transpose(1, 2).flatten(2))
        x = x + _mlp(block.mlp, rms(x, block.norm2))
    merged = rms(x, tower.merger.ln_q).reshape(len(x), -1, tower.merger.hidden_size)
    return tower.merger.mlp(merged)


def picture_rotary(config: Any, size: tuple[int, int], device: Any) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [n, head_dim], of the patches of a picture of ``size`` (width, height): rows, then columns."""
    merge = config.spatial_merge_size
    width, height = (side // config.patch_size for side in size)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    tokens = (
        place.reshape(height // merge, merge, width // merge, merge).transpose(1, 2).flatten()
        for place in (rows, columns)
    )
    quarter = config.hidden_size // config.num_heads // 4
    frequencies = 10000.0 ** -(torch.arange(quarter, dtype=torch.float32) / quarter)
    angles = torch.cat([place[:, None].float() * frequencies for place in tokens], dim=1).repeat(1, 2)
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dimension against each other, as GPT-NeoX does, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def rms(x: Tensor, norm: Any) -> Tensor:
    """``norm`` is one of Qwen2.5-VL's; in fp32, whatever the precision around it."""
    floats = x.float()
    normed = floats * torch.rsqrt(floats.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return (normed * norm.weight).to(x.dtype)
