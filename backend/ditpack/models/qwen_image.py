"""The Qwen-Image transformer over packed tokens.

The same mathematics and parameter names as diffusers ``QwenImageTransformer2DModel`` (its source and
``transformer_qwenimage.py`` are the reference), but with no batch dimension, no mask and no padding: the text and the
image stream are flat token lists, and a layout says which tokens belong to which row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditpack.attention import VarlenAttention
from ditpack.models.rotary import Rotary, apply_rotary
from ditpack.packing.layout import Layout

EPS = 1e-6
MAX_POSITION = 4096  # the reference's rotary tables end here


@dataclass(frozen=True, slots=True)
class QwenImageConfig:
    """The numbers of transformer/config.json; defaults are those of Qwen/Qwen-Image."""

    in_channels: int = 64
    out_channels: int = 16
    patch_size: int = 2
    num_layers: int = 60
    num_attention_heads: int = 24
    attention_head_dim: int = 128
    joint_attention_dim: int = 3584
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QwenImageConfig:
        values = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        if "axes_dims_rope" in values:
            values["axes_dims_rope"] = tuple(values["axes_dims_rope"])
        return cls(**values)

    @property
    def inner_dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True, slots=True)
class PackedRotary:
    """The rotary tables of a layout's two streams."""

    text: Rotary
    image: Rotary


class QwenImageTransformer(nn.Module):
    """The packed transformer. Built from a config alone; parameters come from ``models.weights``."""

    def __init__(self, config: QwenImageConfig, attention: VarlenAttention) -> None:
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.time_text_embed = TimestepEmbedder(dim)
        self.txt_norm = nn.RMSNorm(config.joint_attention_dim, eps=EPS)
        self.img_in = nn.Linear(config.in_channels, dim)
        self.txt_in = nn.Linear(config.joint_attention_dim, dim)
        self.transformer_blocks = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.norm_out = OutputNorm(dim)
        self.proj_out = nn.Linear(dim, config.patch_size**2 * config.out_channels)

    def forward(self, image: Tensor, text: Tensor, timestep: Tensor, layout: Layout, rotary: PackedRotary) -> Tensor:
        """Predict the velocity of every image token.

        Args:
            image: [S, in_channels], the rows' image tokens one after the other.
            text: [L, joint_attention_dim], the rows' text features one after the other, at their real lengths.
            timestep: [R], each row's sigma (the scheduler's timestep / 1000) in the model's dtype.
            layout: of these R rows.
            rotary: ``self.rotary(layout)``; built once per layout.

        Returns:
            [S, patch_size² · out_channels] in the model's dtype.
        """
        temb = F.silu(self.time_text_embed(timestep, image.dtype))
        image = self.img_in(image)
        text = self.txt_in(self.txt_norm(text))
        for block in self.transformer_blocks:
            image, text = block(image, text, temb, layout, rotary)
        return self.proj_out(self.norm_out(image, temb, layout))

    def rotary(self, layout: Layout) -> PackedRotary:
        """The rotary tables of ``layout``, on its device.

        Height and width positions are centred on each grid, the frame position counts the row's grids, and a row's
        text goes on where its largest half grid ends, on all three axes.
        """
        grids = [(frame, *grid) for row in layout.rows for frame, grid in enumerate(row.grids)]
        device = layout.image_grids.device
        frames, heights, widths = (
            torch.tensor(numbers).to(device, non_blocking=True)[layout.image_grids]
            for numbers in zip(*grids, strict=True)
        )
        image = torch.stack(
            (
                frames,
                layout.image_offsets // widths - (heights - heights // 2),
                layout.image_offsets % widths - (widths - widths // 2),
            ),
            dim=1,
        )
        starts = torch.tensor([text_start(row.grids) for row in layout.rows]).to(device, non_blocking=True)
        text = (starts[layout.text_rows] + layout.text_offsets).unsqueeze(1).expand(-1, 3)
        axes = self.config.axes_dims_rope
        return PackedRotary(Rotary.from_positions(text, axes), Rotary.from_positions(image, axes))


def text_start(grids: tuple[tuple[int, int], ...]) -> int:
    """The rotary position of a row's first text token."""
    return max(max(height // 2, width // 2) for height, width in grids)


class Block(nn.Module):
    """One dual-stream block: modulated joint attention, then a modulated MLP a stream."""

    def __init__(self, config: QwenImageConfig, attention: VarlenAttention) -> None:
        super().__init__()
        dim = config.inner_dim
        self.attn = JointAttention(config, attention)
        # The reference has a SiLU at index 0; here temb has been through it once for all layers.
        self.img_mod = nn.Sequential(nn.Identity(), nn.Linear(dim, 6 * dim))
        self.txt_mod = nn.Sequential(nn.Identity(), nn.Linear(dim, 6 * dim))
        self.img_mlp = FeedForward(dim)
        self.txt_mlp = FeedForward(dim)

    def forward(
        self, image: Tensor, text: Tensor, temb: Tensor, layout: Layout, rotary: PackedRotary
    ) -> tuple[Tensor, Tensor]:
        """``image`` [S, D] and ``text`` [L, D] are updated in place; ``temb`` [R, D] has been through SiLU."""
        image_lengths, text_lengths = layout.image_lengths, layout.text_lengths
        # Each six times [R, D]: (shift, scale, gate) for the attention, then the same for the MLP.
        image_mod = self.img_mod(temb).chunk(6, dim=-1)
        text_mod = self.txt_mod(temb).chunk(6, dim=-1)

        image_out, text_out = self.attn(
            modulate(image, image_mod[0], image_mod[1], image_lengths),
            modulate(text, text_mod[0], text_mod[1], text_lengths),
            layout,
            rotary,
        )
        add_gated(image, image_out, image_mod[2], image_lengths)
        add_gated(text, text_out, text_mod[2], text_lengths)

        image_out = self.img_mlp(modulate(image, image_mod[3], image_mod[4], image_lengths))
        text_out = self.txt_mlp(modulate(text, text_mod[3], text_mod[4], text_lengths))
        add_gated(image, image_out, image_mod[5], image_lengths)
        add_gated(text, text_out, text_mod[5], text_lengths)
        return image, text


class JointAttention(nn.Module):
    """Projections of both streams, written to their places in the flat order, attended to row by row."""

    def __init__(self, config: QwenImageConfig, attention: VarlenAttention) -> None:
        super().__init__()
        dim, head_dim = config.inner_dim, config.attention_head_dim
        self.head_dim = head_dim
        self.attention = attention
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=EPS) for _ in range(2))
        self.norm_added_q, self.norm_added_k = (nn.RMSNorm(head_dim, eps=EPS) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.to_add_out = nn.Linear(dim, dim)

    def forward(self, image: Tensor, text: Tensor, layout: Layout, rotary: PackedRotary) -> tuple[Tensor, Tensor]:
        """[S, D] and [L, D] → the streams' attention outputs in the same shapes."""
        q = self._join(
            apply_rotary(self.norm_added_q(self._heads(self.add_q_proj(text))), rotary.text),
            apply_rotary(self.norm_q(self._heads(self.to_q(image))), rotary.image),
            layout,
        )
        k = self._join(
            apply_rotary(self.norm_added_k(self._heads(self.add_k_proj(text))), rotary.text),
            apply_rotary(self.norm_k(self._heads(self.to_k(image))), rotary.image),
            layout,
        )
        v = self._join(self._heads(self.add_v_proj(text)), self._heads(self.to_v(image)), layout)
        out = self.attention(q, k, v, layout).flatten(1)
        return self.to_out[0](out[layout.image_slots]), self.to_add_out(out[layout.text_slots])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    @staticmethod
    def _join(text: Tensor, image: Tensor, layout: Layout) -> Tensor:
        joint = torch.empty((layout.tokens, *image.shape[1:]), dtype=image.dtype, device=image.device)
        joint[layout.text_slots] = text
        joint[layout.image_slots] = image
        return joint


class FeedForward(nn.Module):
    """Linear, GELU (tanh), Linear; named as diffusers names it (net.0.proj, net.2)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Sequential(), nn.Identity(), nn.Linear(4 * dim, dim)])
        self.net[0].add_module("proj", nn.Linear(dim, 4 * dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](F.gelu(self.net[0](x), approximate="tanh"))


class TimestepEmbedder(nn.Module):
    """A sinusoid of 256 channels and two linear layers; named as diffusers names it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = nn.ModuleDict({"linear_1": nn.Linear(256, dim), "linear_2": nn.Linear(dim, dim)})

    def forward(self, timestep: Tensor, dtype: torch.dtype) -> Tensor:
        """``timestep`` [R] in 0 … 1 → [R, dim]. The sinusoid is fp32 (cosines first, scale 1000)."""
        exponents = torch.arange(128, dtype=torch.float32, device=timestep.device) * (-math.log(10000) / 128)
        angles = 1000 * (timestep[:, None].float() * exponents.exp())
        sinusoid = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
        embedder = self.timestep_embedder
        return embedder["linear_2"](F.silu(embedder["linear_1"](sinusoid)))


class OutputNorm(nn.Module):
    """The last modulated norm. Note the order: scale, then shift; the blocks have shift first."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, image: Tensor, temb: Tensor, layout: Layout) -> Tensor:
        scale, shift = self.linear(temb).chunk(2, dim=-1)
        return modulate(image, shift, scale, layout.image_lengths)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, lengths: list[int]) -> Tensor:
    """LayerNorm(x) · (1 + scale) + shift with one shift and scale [R, D] a row; x is [tokens, D], rows of ``lengths``.

    Works on views of the rows: no per-token copy of the modulation exists.
    """
    normed = F.layer_norm(x, (x.shape[-1],), eps=EPS)
    for part, row_shift, row_scale in zip(normed.split(lengths), shift, 1 + scale, strict=True):
        part.mul_(row_scale).add_(row_shift)
    return normed


def add_gated(x: Tensor, update: Tensor, gate: Tensor, lengths: list[int]) -> None:
    """x += gate · update in place, with one gate [R, D] a row."""
    for part, row_update, row_gate in zip(x.split(lengths), update.split(lengths), gate, strict=True):
        part.addcmul_(row_update, row_gate)
