"""MammothModa2's diffusion transformer as plain as its mathematics: one row, no packing, no cache, fp32.

Written from the published facts alone and on purpose without anything of ditpack. ``weights`` are the checkpoint's
tensors by their stored names, ``config`` is its root config.json.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

Weights = dict[str, Tensor]


def load(directory: Path) -> tuple[dict[str, Any], Weights]:
    weights: Weights = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
    return json.loads((directory / "config.json").read_text()), weights


class Oracle:
    """Predicts one row's velocity and denoises one request."""

    def __init__(self, directory: Path) -> None:
        self.config, self.weights = load(directory)
        self.dit = self.config["gen_dit_config"]
        self.nested = self.config["llm_config"]["model_type"] == "mammothmoda2_qwen3_vl"

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rms(self, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.weights[f"{name}.weight"]

    def swiglu(self, name: str, x: Tensor) -> Tensor:
        gate = self.linear(f"{name}.linear_1", x)
        return self.linear(f"{name}.linear_2", gate * gate.sigmoid() * self.linear(f"{name}.linear_3", x))

    # The conditioning.

    def split(self, states: Tensor, ids: list[int], answer_start: int) -> tuple[Tensor, Tensor]:
        llm = self.config["llm_config"]
        start = llm.get("gen_vocab_start_index") or llm["text_config"].get("gen_vocab_start_index", 152064)
        placeholders = {llm[f"{kind}_token_id"] for kind in ("image", "video", "vision_start", "vision_end")}
        text = [i for i, token in enumerate(ids) if i < answer_start and token < start and token not in placeholders]
        image = [i for i, token in enumerate(ids) if i >= answer_start and token >= start]
        return states[text], states[image]

    def multi_head(self, name: str, heads: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.in_proj_weight"], self.weights[f"{name}.in_proj_bias"]
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((q, k, v), weight.chunk(3), bias.chunk(3), strict=True))
        q, k, v = (x.view(len(x), heads, -1).transpose(0, 1) for x in (q, k, v))
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.linear(f"{name}.out_proj", (scores @ v).transpose(0, 1).flatten(1))

    def refine(self, image: Tensor) -> Tensor:
        place = "gen_transformer.time_caption_embed.image_embedder" if self.nested else "gen_image_condition_refiner"
        refiner = self.config["gen_image_condition_refiner_config"]
        heads = refiner["num_heads"]
        keys = self.linear(f"{place}.input_proj.1", self.rms(f"{place}.input_proj.0", image))
        queries = self.weights[f"{place}.query"][0]
        for index in range(refiner["num_layers"]):
            layer = f"{place}.layers.{index}"
            normed = self.rms(f"{layer}.ln_q1", queries)
            queries = queries + self.multi_head(f"{layer}.self_attn", heads, normed, normed, normed)
            normed = self.rms(f"{layer}.ln_q2", queries)
            queries = queries + self.multi_head(f"{layer}.cross_attn", heads, normed, keys, keys)
            queries = queries + self.swiglu(f"{layer}.ffn", self.rms(f"{layer}.ln_ffn", queries))
        return queries

    def caption(self, x: Tensor) -> Tensor:
        name = "gen_transformer.time_caption_embed.caption_embedder"
        return self.linear(f"{name}.1", self.rms(f"{name}.0", x))

    def embed(self, text: Tensor, image: Tensor) -> Tensor:
        """[text, visual tokens] as the transformer takes them; both empty: no conditioning."""
        if len(image) == 0:
            return self.caption(text)
        if self.config.get("gen_image_condition_refiner_config") is None:
            return self.caption(torch.cat((text, image)))
        if self.nested:
            return torch.cat((self.caption(text), self.refine(image)))
        return self.caption(torch.cat((text, self.refine(image))))

    # The transformer.

    def angles(self, positions: Tensor) -> Tensor:
        """[n, 3] → [n, head_dim / 2]"""
        parts = []
        for axis, dim in enumerate(self.config["gen_axes_dim_rope"]):
            frequencies = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            parts.append(positions[:, axis, None].double() * frequencies)
        return torch.cat(parts, dim=1)

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Interleaved pairs of [n, heads, head_dim], as complex numbers."""
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    def block(self, name: str, x: Tensor, angles: Tensor, temb: Tensor | None) -> Tensor:
        if len(x) == 0:
            return x
        eps = self.dit.get("norm_eps", 1e-5)
        zero = torch.zeros(())
        scale, gate, mlp_scale, mlp_gate = zero, None, zero, None
        first = f"{name}.norm1"
        if temb is not None:
            scale, gate, mlp_scale, mlp_gate = self.linear(f"{name}.norm1.linear", F.silu(temb)).chunk(4)
            gate, mlp_gate, first = gate.tanh(), mlp_gate.tanh(), f"{name}.norm1.norm"
        update = self.attention(f"{name}.attn", self.rms(first, x, eps) * (1 + scale), angles)
        x = x + (1 if gate is None else gate) * self.rms(f"{name}.norm2", update, eps)
        update = self.swiglu(f"{name}.feed_forward", self.rms(f"{name}.ffn_norm1", x, eps) * (1 + mlp_scale))
        return x + (1 if mlp_gate is None else mlp_gate) * self.rms(f"{name}.ffn_norm2", update, eps)

    def attention(self, name: str, x: Tensor, angles: Tensor) -> Tensor:
        heads, kv_heads = self.dit["num_attention_heads"], self.dit["num_kv_heads"]
        q = self.linear(f"{name}.to_q", x).view(len(x), heads, -1)
        k = self.linear(f"{name}.to_k", x).view(len(x), kv_heads, -1)
        v = self.linear(f"{name}.to_v", x).view(len(x), kv_heads, -1)
        q, k = self.rotate(self.rms(f"{name}.norm_q", q), angles), self.rotate(self.rms(f"{name}.norm_k", k), angles)
        out = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = (q[:, head] @ k[:, shared].T / math.sqrt(q.shape[-1])).softmax(-1)
            out.append(scores @ v[:, shared])
        return self.linear(f"{name}.to_out.0", torch.cat(out, dim=1))

    def velocity(self, latents: Tensor, time: float, text: Tensor, image: Tensor) -> Tensor:
        """[C, H, W] latents → their velocity. ``text`` and ``image`` both empty: the unconditional branch."""
        channels, height, width = latents.shape
        p = self.dit["patch_size"]
        rows, columns = height // p, width // p
        tokens = torch.stack(
            [
                # (p1 p2 c): the channel is fastest
                latents[:, p * r : p * r + p, p * c : p * c + p].permute(1, 2, 0).flatten()
                for r in range(rows)
                for c in range(columns)
            ]
        )
        t = "gen_transformer"
        frequencies = (-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128).exp()
        phase = self.dit.get("timestep_scale", 1.0) * (torch.tensor(time, dtype=torch.float32) * frequencies)
        temb = self.linear(f"{t}.time_caption_embed.timestep_embedder.linear_1", torch.cat((phase.cos(), phase.sin())))
        temb = self.linear(f"{t}.time_caption_embed.timestep_embedder.linear_2", F.silu(temb))

        context = self.embed(text, image)
        length = len(context)
        positions = [(i, i, i) for i in range(length)] + [(length, r, c) for r in range(rows) for c in range(columns)]
        angles = self.angles(torch.tensor(positions))
        for index in range(self.dit["num_refiner_layers"]):
            context = self.block(f"{t}.context_refiner.{index}", context, angles[:length], None)
        x = self.linear(f"{t}.x_embedder", tokens)
        for index in range(self.dit["num_refiner_layers"]):
            x = self.block(f"{t}.noise_refiner.{index}", x, angles[length:], temb)
        x = torch.cat((context, x))
        for index in range(self.dit["num_layers"]):
            x = self.block(f"{t}.layers.{index}", x, angles, temb)
        x = x[length:]
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        x = self.linear(f"{t}.norm_out.linear_2", x * (1 + self.linear(f"{t}.norm_out.linear_1", F.silu(temb))))
        return x.view(rows, columns, p, p, channels).permute(4, 0, 2, 1, 3).reshape(channels, height, width)

    # The loop.

    def denoise(
        self,
        states: Tensor,
        ids: list[int],
        answer_start: int,
        size: tuple[int, int],
        steps: int,
        guidance: float,
        cfg_range: tuple[float, float],
        seed: int,
    ) -> Tensor:
        """The finished latents [C, height / 8, width / 8]; ``size`` is (width, height) in pixels."""
        text, image = self.split(states, ids, answer_start)
        shape = (1, self.dit["in_channels"], size[1] // 8, size[0] // 8)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))[0]
        m = math.sqrt(shape[2] * shape[3]) / 40
        times = [(i / steps) / (m - m * (i / steps) + i / steps) for i in range(steps)] + [1.0]
        for i in range(steps):
            v = self.velocity(x, times[i], text, image)
            if guidance > 1 and cfg_range[0] <= i / steps <= cfg_range[1]:
                unconditional = self.velocity(x, times[i], states[:0], states[:0])
                v = unconditional + guidance * (v - unconditional)
            x = x + (times[i + 1] - times[i]) * v
        return x
