"""The diffusion transformer of MammothModa2 over packed tokens.

The mathematics and, below ``stored_name``, the parameter names of bytedance/mammothmoda ``Transformer2DModel``, without
batch, mask and padding. What does not depend on the timestep, a row's refined conditioning, is computed once a request
(``context``); a step runs the noise refiner over the image tokens and the joint layers over [text, image].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditpack.attention import VarlenAttention
from ditpack.models.mammoth_config import MammothModa2Config
from ditpack.models.qformer import QFormer, SwiGLU
from ditpack.models.rotary import Rotary
from ditpack.models.sandwich import Stream, norm_rotate
from ditpack.packing.layout import Layout, Row, build_layout

_QK_EPS = 1e-5  # of the query and key norms and of the caption's, whatever norm_eps is
_OUT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Tokens:
    """A flat list of tokens and what a layer needs to know of it."""

    layout: Layout
    rows: Tensor  # int64 [n]: row of each token
    rotary: Rotary


@dataclass(frozen=True, slots=True)
class Plan:
    """The tokens of a pack as the joint layers see them, and the image tokens alone, as the noise refiner does."""

    joint: Tokens
    image: Tokens


class MammothModa2Transformer(nn.Module):
    """The packed transformer with its refiners. Built from a config alone; parameters come by ``stored_name``."""

    def __init__(self, config: MammothModa2Config, attention: VarlenAttention) -> None:
        super().__init__()
        self.config = config
        dim, patch = config.hidden_size, config.patch_size**2 * config.in_channels
        self.image_refiner: QFormer | None = None
        if config.refiner is not None:
            width = dim if config.nested_refiner else config.llm_hidden_size
            self.image_refiner = QFormer(config.refiner, config.llm_hidden_size, width)
        self.caption_embedder = nn.Sequential(
            nn.RMSNorm(config.llm_hidden_size, eps=_QK_EPS), nn.Linear(config.llm_hidden_size, dim)
        )
        self.time_embedder = TimestepEmbedder(config.time_dim, config.timestep_scale)
        self.x_embedder = nn.Linear(patch, dim)
        refiners = range(config.num_refiner_layers)
        self.context_refiner = nn.ModuleList(Block(config, attention, modulated=False) for _ in refiners)
        self.noise_refiner = nn.ModuleList(Block(config, attention, modulated=True) for _ in refiners)
        self.layers = nn.ModuleList(Block(config, attention, modulated=True) for _ in range(config.num_layers))
        self.norm_out = OutputNorm(config.time_dim, dim, patch)

    def context(self, conditions: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The refined conditioning of rows, packed: (text [l, llm_hidden_size], visual tokens [v, …]) → [c, D] each.

        c is ``config.context_tokens(l, v)``; l may be 0.
        """
        embedded = [self._caption(text, image) for text, image in conditions]
        lengths = [len(row) for row in embedded]
        layout = build_layout([Row(length, ()) for length in lengths], embedded[0].device)
        tokens = Tokens(layout, layout.text.rows, self._rotary(layout))
        stream = Stream(torch.cat(embedded), tokens.rows)
        for block in self.context_refiner:
            block(stream, tokens)
        return list(stream.end().split(lengths))

    def _caption(self, text: Tensor, image: Tensor) -> Tensor:
        if self.image_refiner is None:
            return self.caption_embedder(torch.cat((text, image)))
        refined = self.image_refiner(image)
        if self.config.nested_refiner:
            return torch.cat((self.caption_embedder(text), refined))
        return self.caption_embedder(torch.cat((text, refined)))

    def plan(self, rows: Sequence[Row], device: torch.device) -> Plan:
        """Lay out ``rows``, each with the length of its context, which may be 0, and one image grid."""
        joint = build_layout(rows, device)
        flat_rows = torch.empty(joint.tokens, dtype=torch.int64, device=device)
        flat_rows[joint.text.slots], flat_rows[joint.image.slots] = joint.text.rows, joint.image.rows
        rotary = self._rotary(joint)
        slots = joint.image.slots
        image = build_layout([Row(0, row.grids) for row in rows], device)
        return Plan(
            Tokens(joint, flat_rows, rotary),
            Tokens(image, image.image.rows, Rotary(rotary.cos[slots], rotary.sin[slots])),
        )

    def forward(self, image: Tensor, context: Tensor, timesteps: Tensor, plan: Plan) -> Tensor:
        """Predict the velocity of every image token.

        Args:
            image: [S, patch_size² · in_channels], the rows' image tokens in the model's dtype, channel fastest.
            context: [L, D], the rows' ``context``, one after the other; rows without any have no tokens here.
            timesteps: [R], 0 = noise, 1 = data, in the model's dtype.
            plan: of these R rows.

        Returns:
            [S, patch_size² · in_channels].
        """
        temb = F.silu(self.time_embedder(timesteps))
        noise = Stream(self.x_embedder(image), plan.image.rows)
        for block in self.noise_refiner:
            block(noise, plan.image, temb)
        layout = plan.joint.layout
        x = context.new_empty((layout.tokens, context.shape[1]))
        x[layout.text.slots], x[layout.image.slots] = context, noise.end()
        stream = Stream(x, plan.joint.rows)
        for block in self.layers:
            block(stream, plan.joint, temb)
        return self.norm_out(stream.end()[layout.image.slots], temb, plan.image.rows)

    def _rotary(self, layout: Layout) -> Rotary:
        """Text token l stands at (l, l, l); an image token at (length of its row's context, its row, its column)."""
        device = layout.cu_seqlens.device
        positions = torch.empty((layout.tokens, 3), dtype=torch.int64, device=device)
        positions[layout.text.slots] = layout.text_offsets.unsqueeze(1)
        grids = [(row.text_tokens, width) for row in layout.rows for _, width in row.grids]
        if grids:
            lengths, widths = torch.tensor(grids).to(device, non_blocking=True)[layout.image_grids].unbind(1)
            offsets = layout.image_offsets
            positions[layout.image.slots] = torch.stack((lengths, offsets // widths, offsets % widths), dim=1)
        return Rotary.from_positions(positions, self.config.axes_dim, dtype=torch.float64)


class Block(nn.Module):
    """Attention and a gated feed-forward, each between two RMS norms; ``modulated``: scaled and gated by the time."""

    def __init__(self, config: MammothModa2Config, attention: VarlenAttention, modulated: bool) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.norm_eps
        self.attn = GroupedQueryAttention(config, attention)
        self.feed_forward = SwiGLU(dim, config.ffn_dim(dim))
        self.norm1, self.ffn_norm1, self.norm2, self.ffn_norm2 = (nn.RMSNorm(dim, eps=eps) for _ in range(4))
        self.modulation = nn.Linear(config.time_dim, 4 * dim) if modulated else None

    def forward(self, stream: Stream, tokens: Tokens, temb: Tensor | None = None) -> None:
        """Advance ``stream``; ``temb`` [R, time_dim] has been through its SiLU."""
        scale = gate = mlp_scale = mlp_gate = None
        if self.modulation is not None:
            assert temb is not None
            scale, gate, mlp_scale, mlp_gate = self.modulation(temb).chunk(4, dim=1)
        stream.add(self.attn(stream.norm(self.norm1, scale), tokens), self.norm2, gate)
        stream.add(self.feed_forward(stream.norm(self.ffn_norm1, mlp_scale)), self.ffn_norm2, mlp_gate)


class GroupedQueryAttention(nn.Module):
    """Several query heads share one key and value head; queries and keys are normed and rotated."""

    def __init__(self, config: MammothModa2Config, attention: VarlenAttention) -> None:
        super().__init__()
        dim, head_dim = config.hidden_size, config.head_dim
        self.head_dim, self.attention = head_dim, attention
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k, self.to_v = (nn.Linear(dim, config.num_kv_heads * head_dim, bias=False) for _ in range(2))
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=_QK_EPS) for _ in range(2))
        self.to_out = nn.Sequential(nn.Linear(dim, dim, bias=False))

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """[n, D] → [n, D]."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.to_q, self.to_k, self.to_v))
        q, k = norm_rotate(q, self.norm_q, tokens.rotary), norm_rotate(k, self.norm_k, tokens.rotary)
        return self.to_out(self.attention(q, k, v, tokens.layout).flatten(1))


class OutputNorm(nn.Module):
    """LayerNorm without weights, scaled by the time, and the projection to patches."""

    def __init__(self, time_dim: int, dim: int, out_dim: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(time_dim, dim), nn.Linear(dim, out_dim)

    def forward(self, x: Tensor, temb: Tensor, rows: Tensor) -> Tensor:
        scale = 1 + self.linear_1(temb)
        return self.linear_2(F.layer_norm(x, x.shape[-1:], eps=_OUT_EPS) * scale[rows])


class TimestepEmbedder(nn.Module):
    """A sinusoid of 256 channels, cosines first, and two linear layers."""

    def __init__(self, dim: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.linear_1, self.linear_2 = nn.Linear(256, dim), nn.Linear(dim, dim)

    def forward(self, timestep: Tensor) -> Tensor:
        """``timestep`` [n] → [n, dim]. The sinusoid is fp32, in the order of diffusers' ``get_timestep_embedding``."""
        exponents = -math.log(10000) * torch.arange(128, dtype=torch.float32, device=timestep.device) / 128
        angles = self.scale * (timestep[:, None].float() * exponents.exp())
        embedding = torch.cat((angles.cos(), angles.sin()), dim=-1).to(timestep.dtype)
        return self.linear_2(F.silu(self.linear_1(embedding)))


def stored_name(key: str) -> str | None:
    """The checkpoint's name of a parameter → ours; None for what belongs to other stages or to reference images."""
    key = key.replace("gen_image_condition_refiner.", "image_refiner.")
    if not key.startswith(("gen_transformer.", "image_refiner.")):
        return None
    key = key.removeprefix("gen_transformer.")
    if key.startswith(("ref_image_", "image_index_embedding")):
        return None
    for theirs, ours in (
        ("time_caption_embed.image_embedder.", "image_refiner."),
        ("time_caption_embed.caption_embedder.", "caption_embedder."),
        ("time_caption_embed.timestep_embedder.", "time_embedder."),
        ("norm1.linear.", "modulation."),
        ("norm1.norm.", "norm1."),
    ):
        key = key.replace(theirs, ours)
    return key
