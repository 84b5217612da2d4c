"""The Qwen-Image transformer over packed tokens.

The same mathematics and parameter names as diffusers ``QwenImageTransformer2DModel`` (its source and
``transformer_qwenimage.py`` are the reference), but with no batch dimension, no mask and no padding: the text and the
image stream are flat token lists, and a layout says which tokens belong to which row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditpack.attention import VarlenAttention
from ditpack.models.modulation import Modulation
from ditpack.models.ops import EPS, add_modulate, linear_gelu, modulate, take, write_heads
from ditpack.models.quantized import Activation, Fp8Linear
from ditpack.models.rotary import Rotary
from ditpack.models.weights import Part
from ditpack.packing.layout import Layout

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
    zero_cond_t: bool = False  # the blocks modulate reference images as at timestep 0

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
    """The packed transformer. Built from a config alone; parameters come from ``models.weights`` by ``stored_name``."""

    def __init__(self, config: QwenImageConfig, attention: VarlenAttention) -> None:
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.time_text_embed = TimestepEmbedder(dim)
        self.txt_norm = nn.RMSNorm(config.joint_attention_dim, eps=EPS)
        self.img_in = nn.Linear(config.in_channels, dim)
        self.txt_in = nn.Linear(config.joint_attention_dim, dim)
        self.transformer_blocks = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.norm_out = named("linear", nn.Linear(dim, 2 * dim))
        self.proj_out = nn.Linear(dim, config.patch_size**2 * config.out_channels)

    def forward(
        self, image: Tensor, text: Tensor, modulation: Modulation, layout: Layout, rotary: PackedRotary
    ) -> Tensor:
        """Predict the velocity of every image token.

        Args:
            image: [S, in_channels], the rows' image tokens one after the other, in the model's dtype.
            text: [L, joint_attention_dim], the rows' text features one after the other, at their real lengths.
            modulation: of the R rows' timesteps, ``self.modulation`` or rows of a ``ModulationTable`` of it.
            layout: of these R rows; with zero_cond_t built with ``split_references``, and the modulation to match.
            rotary: ``self.rotary(layout)``; built once per layout.

        Returns:
            [S, patch_size² · out_channels] in the model's dtype.
        """
        streams = Streams(self.img_in(image), self.txt_in(self.txt_norm(text)), layout)
        for index, block in enumerate(self.transformer_blocks):
            block(streams, modulation.image[:, index], modulation.text[:, index], layout, rotary)
        # Note the order: scale, then shift; the blocks have shift first.
        scale, shift = modulation.out.unbind(1)
        streams.fp8 = False  # the way in and the way out stay exact
        return self.proj_out(streams.next_image(shift, scale))

    def modulation(self, timesteps: Tensor) -> Modulation:
        """The modulation of every layer for ``timesteps`` [n]: sigmas, in the model's dtype."""
        temb = F.silu(self.time_text_embed(timesteps))
        blocks = cast(Iterable[Block], self.transformer_blocks)
        image, text = zip(*((block.img_mod(temb), block.txt_mod(temb)) for block in blocks), strict=True)
        out = self.norm_out(temb).unflatten(-1, (2, -1))
        image, text = (torch.stack(stream, dim=1).unflatten(-1, (6, -1)) for stream in (image, text))
        return Modulation(image, text, out)

    def rotary(self, layout: Layout) -> PackedRotary:
        """The rotary tables of ``layout``, on its device.

        Height and width positions are centred on each grid, the frame position counts the row's grids, and a row's
        text goes on where its largest half grid ends, on all three axes.
        """
        grids = [(frame, *grid) for row in layout.rows for frame, grid in enumerate(row.grids)]
        device = layout.image_grids.device
        frames, heights, widths = torch.tensor(grids).to(device, non_blocking=True)[layout.image_grids].unbind(1)
        image = torch.stack(
            (
                frames,
                layout.image_offsets // widths - (heights - heights // 2),
                layout.image_offsets % widths - (widths - widths // 2),
            ),
            dim=1,
        )
        starts = torch.tensor([text_start(row.grids) for row in layout.rows]).to(device, non_blocking=True)
        text = (starts[layout.text.rows] + layout.text_offsets).unsqueeze(1).expand(-1, 3)
        axes = self.config.axes_dims_rope
        return PackedRotary(Rotary.from_positions(text, axes), Rotary.from_positions(image, axes))


def text_start(grids: tuple[tuple[int, int], ...]) -> int:
    """The rotary position of a row's first text token."""
    return max(max(height // 2, width // 2) for height, width in grids)


def stored_name(key: str) -> str | Part:
    """diffusers' name of a parameter → ours; queries, keys and values of a stream are one layer here."""
    for index, name in enumerate("qkv"):
        for theirs, ours in ((f".to_{name}.", ".to_qkv."), (f".add_{name}_proj.", ".add_qkv.")):
            if theirs in key:
                return Part(key.replace(theirs, ours), index, 3)
    return key


class Streams:
    """The residual streams, image [S, D] and text [L, D], each with the gated update that is still to be added.

    Adding it and norming for the next layer are one pass over memory, so an update waits for its next reader.
    """

    def __init__(self, image: Tensor, text: Tensor, layout: Layout) -> None:
        self.image, self.text = image, text
        self.layout = layout
        self.fp8 = False  # whether the next layers take quantised activations
        self.image_update: tuple[Tensor, Tensor] | None = None  # (update, gate [R or 2R, D])
        self.text_update: tuple[Tensor, Tensor] | None = None

    def next_image(self, shift: Tensor, scale: Tensor) -> Activation:
        """Add the waiting update to the image stream, in place, and return it normed and modulated."""
        if self.image_update is None:
            return modulate(self.image, shift, scale, self.layout.image, self.fp8)
        return add_modulate(self.image, *self.image_update, shift, scale, self.layout.image, self.fp8)

    def next_text(self, shift: Tensor, scale: Tensor) -> Activation:
        """The same for the text stream."""
        if self.text_update is None:
            return modulate(self.text, shift, scale, self.layout.text, self.fp8)
        return add_modulate(self.text, *self.text_update, shift, scale, self.layout.text, self.fp8)


class Block(nn.Module):
    """One dual-stream block: modulated joint attention, then a modulated MLP a stream."""

    def __init__(self, config: QwenImageConfig, attention: VarlenAttention) -> None:
        super().__init__()
        dim = config.inner_dim
        self.attn = JointAttention(config, attention)
        # The reference has a SiLU at index 0; here the embedding has been through it once for all layers.
        self.img_mod = nn.Sequential(nn.Identity(), nn.Linear(dim, 6 * dim))
        self.txt_mod = nn.Sequential(nn.Identity(), nn.Linear(dim, 6 * dim))
        self.img_mlp = FeedForward(dim)
        self.txt_mlp = FeedForward(dim)

    def forward(
        self, streams: Streams, image_mod: Tensor, text_mod: Tensor, layout: Layout, rotary: PackedRotary
    ) -> None:
        """Advance ``streams``. ``image_mod`` and ``text_mod`` are [rows, 6, D], as ``Modulation`` holds them."""
        streams.fp8 = isinstance(self.attn.to_qkv, Fp8Linear)
        image_shift, image_scale, image_gate, image_mlp_shift, image_mlp_scale, image_mlp_gate = image_mod.unbind(1)
        text_shift, text_scale, text_gate, text_mlp_shift, text_mlp_scale, text_mlp_gate = text_mod.unbind(1)

        image_out, text_out = self.attn(
            streams.next_image(image_shift, image_scale),
            streams.next_text(text_shift, text_scale),
            layout,
            rotary,
        )
        streams.image_update, streams.text_update = (image_out, image_gate), (text_out, text_gate)

        image_out = self.img_mlp(streams.next_image(image_mlp_shift, image_mlp_scale))
        text_out = self.txt_mlp(streams.next_text(text_mlp_shift, text_mlp_scale))
        streams.image_update, streams.text_update = (image_out, image_mlp_gate), (text_out, text_mlp_gate)


class JointAttention(nn.Module):
    """Projections of both streams, written to their places in the flat order, attended to row by row."""

    def __init__(self, config: QwenImageConfig, attention: VarlenAttention) -> None:
        super().__init__()
        dim, head_dim = config.inner_dim, config.attention_head_dim
        self.heads, self.head_dim = config.num_attention_heads, head_dim
        # Where the heads are written and how they are attended to: what parallel.ulysses replaces.
        self.allocate: Callable[[Tensor, Layout], tuple[Tensor, Tensor, Tensor]] = self.joint_heads
        self.attention = attention
        self.to_qkv, self.add_qkv = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=EPS) for _ in range(2))
        self.norm_added_q, self.norm_added_k = (nn.RMSNorm(head_dim, eps=EPS) for _ in range(2))
        self.to_out = nn.Sequential(nn.Linear(dim, dim))
        self.to_add_out = nn.Linear(dim, dim)

    def forward(
        self, image: Activation, text: Activation, layout: Layout, rotary: PackedRotary
    ) -> tuple[Tensor, Tensor]:
        """[S, D] and [L, D] → the streams' attention outputs in the same shapes."""
        image_qkv, text_qkv = self.to_qkv(image), self.add_qkv(text)
        q, k, v = self.allocate(image_qkv, layout)
        write_heads(image_qkv, self.norm_q.weight, self.norm_k.weight, rotary.image, layout.image, (q, k, v))
        write_heads(text_qkv, self.norm_added_q.weight, self.norm_added_k.weight, rotary.text, layout.text, (q, k, v))
        out = self.attention(q, k, v, layout)
        fp8 = isinstance(self.to_add_out, Fp8Linear)
        return self.to_out(take(out, layout.image.slots, fp8)), self.to_add_out(take(out, layout.text.slots, fp8))

    def joint_heads(self, like: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for the queries, keys and values of a pack, [T, heads, head_dim] each, with ``like``'s dtype."""
        q, k, v = like.new_empty((3, layout.tokens, self.heads, self.head_dim)).unbind(0)
        return q, k, v


class FeedForward(nn.Module):
    """Linear, GELU (tanh), Linear; named as diffusers names it (net.0.proj, net.2)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(named("proj", nn.Linear(dim, 4 * dim)), nn.Identity(), nn.Linear(4 * dim, dim))

    def forward(self, x: Activation) -> Tensor:
        return self.net[2](linear_gelu(self.net.get_submodule("0.proj"), x))


class TimestepEmbedder(nn.Module):
    """A sinusoid of 256 channels and two linear layers; named as diffusers names it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = nn.Sequential()
        self.timestep_embedder.add_module("linear_1", nn.Linear(256, dim))
        self.timestep_embedder.add_module("silu", nn.SiLU())
        self.timestep_embedder.add_module("linear_2", nn.Linear(dim, dim))

    def forward(self, timestep: Tensor) -> Tensor:
        """``timestep`` [n] in 0 … 1 → [n, dim]. The sinusoid is fp32 (cosines first, scale 1000)."""
        exponents = torch.arange(128, dtype=torch.float32, device=timestep.device) * (-math.log(10000) / 128)
        angles = 1000 * (timestep[:, None].float() * exponents.exp())
        return self.timestep_embedder(torch.cat((angles.cos(), angles.sin()), dim=-1).to(timestep.dtype))


def named(name: str, module: nn.Module) -> nn.Sequential:
    """``module`` under the name that diffusers gives it."""
    parent = nn.Sequential()
    parent.add_module(name, module)
    return parent
