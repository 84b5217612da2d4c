"""One guided step of MammothModa2's transformer: packed against a padded batch of the same module, in one run.

    python tests/bench/mammoth.py --out tests/bench/results/mammoth.h200.json     # full size, random weights
    python tests/bench/mammoth.py --toy --repeats 2                               # anywhere

The padded batch is what batching means without packing: conditioning and image tokens are padded on the right to the
longest, keys are masked, and guidance is a second forward without conditioning. It gets the same refined conditioning,
computed once and not at every step, so the difference is the packing alone. Where nothing is padded it has no mask.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import machine
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditpack.attention import select_attention
from ditpack.models.mammoth_config import MammothModa2Config, RefinerConfig
from ditpack.models.mammoth_moda2 import MammothModa2Transformer, Tokens
from ditpack.models.mammoth_request import resolve
from ditpack.models.rotary import Rotary
from ditpack.models.sandwich import Stream
from ditpack.packing.layout import Layout
from ditpack.request import Limits
from ditpack.sampling.mammoth_moda2 import Conditioning, Denoising, MammothModa2Sampler

GUIDANCE = 4.0
STEPS = 50
TEXT_TOKENS, VISUAL_TOKENS = (60, 140), 1024  # text varies, as prompts do
FULL = MammothModa2Config(refiner=RefinerConfig(num_queries=576))
TOY = MammothModa2Config(
    in_channels=4, hidden_size=96, num_layers=2, num_refiner_layers=1, num_attention_heads=6, num_kv_heads=2,
    axes_dim=(4, 4, 8), llm_hidden_size=64, refiner=RefinerConfig(num_queries=8),
)  # fmt: skip
MIXES: dict[str, list[tuple[int, int]]] = {
    "1 x 1024²": [(1024, 1024)],
    "8 x 1024²": [(1024, 1024)] * 8,
    "1 x 512²": [(512, 512)],
    "8 x 512²": [(512, 512)] * 8,
    "512² to 1024²": [
        *((512, 512), (512, 768), (768, 512), (640, 640)),
        *((768, 768), (1024, 768), (768, 1024), (1024, 1024)),
    ],
}


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    toy = options.toy or device.type == "cpu"
    config, shrink = (TOY, 8) if toy else (FULL, 1)
    heads = (config.num_attention_heads, config.head_dim, config.num_kv_heads)
    attention = select_attention(options.attention, device, dtype, *heads)
    with torch.device("meta"):
        packed, padded = MammothModa2Transformer(config, attention), MammothModa2Transformer(config, padded_attention)
    packed = packed.to(dtype).to_empty(device=device)
    random_weights(packed)
    padded.load_state_dict(packed.state_dict(), assign=True)
    sampler = MammothModa2Sampler(packed.eval().requires_grad_(False), 16)

    meta = machine.meta() | {"attention": attention.name, "layers": config.num_layers, "toy": toy}
    meta |= {"guidance": GUIDANCE, "matmul_tflops": round(machine.matmul_ceiling(device), 1)}
    print(json.dumps(meta, indent=1), flush=True)
    records = []
    for mix, sizes in MIXES.items():
        members = [
            begin(sampler, width // shrink, height // shrink, index) for index, (width, height) in enumerate(sizes)
        ]
        records.append(measure(mix, sampler, padded, members, options.repeats))
        print(json.dumps(records[-1]), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"meta": meta, "records": records}, indent=1) + "\n")
    for size in ("1024²", "512²"):
        one, eight = (next(r["packed_ms"] for r in records if r["mix"] == f"{n} x {size}") for n in (1, 8))
        print(f"{size}: {one:.2f} ms a step and image alone, {eight / 8:.2f} with 8 in flight: {8 * one / eight:.2f} x")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a small model and sizes divided by 8; always on a CPU")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


@torch.no_grad()
def random_weights(model: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.normal_(0, 0.1).add_(1)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)


def begin(sampler: MammothModa2Sampler, width: int, height: int, index: int) -> Denoising:
    values = {"WIDTH": width, "HEIGHT": height, "NUM_INFERENCE_STEPS": STEPS, "GUIDANCE_SCALE": GUIDANCE, "SEED": index}
    low, high = TEXT_TOKENS
    text = low + (high - low) * (index % 4) // 3
    generator = torch.Generator().manual_seed(index)
    states = torch.randn(text + VISUAL_TOKENS, sampler.config.llm_hidden_size, generator=generator)
    return sampler.begin(resolve(values, Limits(1024, 1024, min_size=16)), Conditioning(states, text))


@torch.inference_mode()
def measure(
    mix: str,
    sampler: MammothModa2Sampler,
    padded: MammothModa2Transformer,
    members: list[Denoising],
    repeats: int,
) -> dict[str, Any]:
    """ms of one step for all ``members``: packed, as a padded batch, and packed one by one."""
    together = packed_step(sampler, members)
    one_by_one = [packed_step(sampler, [member]) for member in members]
    batch = padded_step(padded, members)
    ours, theirs = together(), batch()
    error = max(float((o - t).norm() / t.norm()) for o, t in zip(ours, theirs, strict=True))
    packed_ms = machine.milliseconds(together, repeats, 2)
    padded_ms = machine.milliseconds(batch, repeats, 2)
    serial_ms = sum(machine.milliseconds(call, repeats, 2) for call in one_by_one) if len(members) > 1 else packed_ms
    return {
        "mix": mix,
        "requests": len(members),
        "packed_ms": round(packed_ms, 3),
        "padded_ms": round(padded_ms, 3),
        "serial_ms": round(serial_ms, 3),
        "packed_ms_per_image": round(packed_ms / len(members), 3),
        "padded_over_packed": round(padded_ms / packed_ms, 3),
        "serial_over_packed": round(serial_ms / packed_ms, 3),
        "tflops": round(flops(members, sampler.config) / packed_ms / 1e9, 1),
        "rel_err": float(f"{error:.3g}"),
    }


def packed_step(sampler: MammothModa2Sampler, members: list[Denoising]) -> Callable[[], list[Tensor]]:
    """The sampler's own step, always the first one of the same latents; the pack is built once, here."""
    pack = sampler.pack(members)
    start, pack.next = pack.latents, 1  # not at t = 0, where little depends on the time

    def step() -> list[Tensor]:
        pack.latents, pack.next = start, 1
        sampler.step(pack)
        for member in pack.members:
            member.step = 0
        return list(pack.latents.split([len(member.latents) for member in pack.members]))

    for member, latents in zip(pack.members, start.split([len(m.latents) for m in pack.members]), strict=True):
        member.latents = latents
    return step


# The padded batch.


@dataclass(frozen=True)
class Padded:
    """Stands in for a layout: [batch · length] tokens, of which ``mask`` [batch, length] are real; None: all."""

    batch: int
    length: int
    mask: Tensor | None


def padded_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    padded = cast(Padded, layout)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # masks and enable_gqa mean no kernel
    q, k, v = (x.unflatten(0, (padded.batch, padded.length)).transpose(1, 2) for x in (q, k, v))
    mask = None if padded.mask is None else padded.mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1)


class PaddedBranch:
    """One forward of one guidance branch over a padded batch: contexts [c, D] (or none), grids of the images."""

    def __init__(
        self, model: MammothModa2Transformer, contexts: list[Tensor], grids: list[tuple[int, int]], times: Tensor
    ) -> None:
        self.model, self.contexts, self.times = model, contexts, times
        self.images = [height * width for height, width in grids]
        lengths = [len(context) + image for context, image in zip(contexts, self.images, strict=True)]
        positions = [
            torch.tensor(
                [(i, i, i) for i in range(len(context))]
                + [(len(context), row, column) for row in range(height) for column in range(width)]
            )
            for context, (height, width) in zip(contexts, grids, strict=True)
        ]
        self.joint = self._tokens(positions, lengths)
        image_positions = [place[len(context) :] for place, context in zip(positions, contexts, strict=True)]
        self.image = self._tokens(image_positions, self.images)

    def _tokens(self, positions: list[Tensor], lengths: list[int]) -> Tokens:
        device = self.times.device
        longest = max(lengths)
        table = torch.stack([F.pad(place, (0, 0, 0, longest - len(place))) for place in positions]).flatten(0, 1)
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        layout = Padded(len(lengths), longest, None if mask.all() else mask.to(device))
        rows = torch.arange(len(lengths), device=device).repeat_interleave(longest)
        rotary = Rotary.from_positions(table.to(device), self.model.config.axes_dim, dtype=torch.float64)
        return Tokens(cast(Layout, layout), rows, rotary)

    def __call__(self, image: Tensor) -> Tensor:
        """[batch, longest image, C] → the velocity, in the same shape."""
        batch, longest, _ = image.shape
        temb = F.silu(self.model.time_embedder(self.times))
        stream = Stream(self.model.x_embedder(image).flatten(0, 1), self.image.rows)
        for block in self.model.noise_refiner:
            block(stream, self.image, temb)
        noise = stream.end().unflatten(0, (batch, longest))
        x = noise.new_zeros((batch, cast(Padded, self.joint.layout).length, noise.shape[2]))
        for row, (context, length) in enumerate(zip(self.contexts, self.images, strict=True)):
            x[row, : len(context)] = context
            x[row, len(context) : len(context) + length] = noise[row, :length]
        stream = Stream(x.flatten(0, 1), self.joint.rows)
        for block in self.model.layers:
            block(stream, self.joint, temb)
        x = stream.end().unflatten(0, (batch, -1))
        out = torch.zeros_like(noise)
        for row, (context, length) in enumerate(zip(self.contexts, self.images, strict=True)):
            out[row, :length] = x[row, len(context) : len(context) + length]
        return self.model.norm_out(out.flatten(0, 1), temb, self.image.rows).unflatten(0, (batch, longest))


def padded_step(model: MammothModa2Transformer, members: list[Denoising]) -> Callable[[], list[Tensor]]:
    """The step of ``packed_step``: two forwards, guidance, Euler."""
    first = members[0].latents
    dtype = next(model.parameters()).dtype
    grids = [member.grid for member in members]
    times = torch.tensor([member.times[1] for member in members], device=first.device)
    steps = torch.tensor([member.times[2] - member.times[1] for member in members], device=first.device)[:, None, None]
    contexts = [member.context for member in members]
    conditional = PaddedBranch(model, contexts, grids, times.to(dtype))
    unconditional = PaddedBranch(model, [context[:0] for context in contexts], grids, times.to(dtype))
    lengths = [len(member.latents) for member in members]
    latents = nn.utils.rnn.pad_sequence([member.latents for member in members], batch_first=True)

    def step() -> list[Tensor]:
        image = latents.to(dtype)
        velocity, without = conditional(image).float(), unconditional(image).float()
        moved = latents + steps * (without + GUIDANCE * (velocity - without))
        return [row[:length] for row, length in zip(moved, lengths, strict=True)]

    return step


def flops(members: list[Denoising], config: MammothModa2Config) -> float:
    """FLOP of one guided step of the rows' real tokens, layers and noise refiner."""
    dim = config.hidden_size
    kv_dim = config.num_kv_heads * config.head_dim
    weights = 2 * dim**2 + 2 * dim * kv_dim + 3 * dim * config.ffn_dim(dim)
    images = [image for member in members for image in [len(member.latents)] * 2]
    joint = [
        length for member in members for length in (len(member.latents) + len(member.context), len(member.latents))
    ]

    def total(lengths: list[int], layers: int) -> float:
        return layers * (2 * weights * sum(lengths) + 4 * dim * sum(length**2 for length in lengths))

    return total(joint, config.num_layers) + total(images, config.num_refiner_layers)


if __name__ == "__main__":
    main()
