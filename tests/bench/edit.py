"""One denoising step of four edits: ours, packed, against diffusers one after the other, same weights, same run.

    python tests/bench/edit.py --out tests/bench/results/edit.h200.json    # full-size Qwen-Image-Edit, random weights
    python tests/bench/edit.py --layers 2 --heads 4 --sides 128            # anywhere

Prints ms, the ratio, TFLOP/s by the rows' own lengths squared, the share of the floor, and how far the two are apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import machine
import torch
from diffusers import QwenImageTransformer2DModel
from step import build_reference, build_sampler, flops
from step_impls import SIGMA, image_request
from torch import Tensor

from ditpack.attention import select_attention
from ditpack.models.editing import scaled
from ditpack.models.quantized import quantize_blocks
from ditpack.models.qwen_image import QwenImageConfig
from ditpack.request import Reference
from ditpack.sampling.guidance import true_cfg
from ditpack.sampling.qwen_image import Conditioning, QwenImageSampler

# For each edit the aspect (width / height) of each of its images; the result has that of the last, as in the pipelines.
MIXES: dict[str, list[tuple[float, ...]]] = {
    "one": [(1.0,), (4 / 3,), (3 / 4,), (16 / 9,)],
    "mixed": [(1.0,), (4 / 3,), (3 / 4, 16 / 9), (1.0, 9 / 16, 3 / 2)],
}
# What the checkpoints differ in: Qwen-Image-Edit-2511 has zero_cond_t, those before it have not.
CHECKPOINTS = {"2509": False, "2511": True}
IMPLS = ("ditpack", "ditpack-fp8")
PROMPT_TOKENS, NEGATIVE_TOKENS = 40, 6
SCALE = 4.0


@dataclass(frozen=True)
class Case:
    """One edit: its sizes in pixels (width, height), target first, and the inputs of its rows."""

    sizes: tuple[tuple[int, int], ...]
    image: Tensor  # [S, C], the target's tokens, then the references'
    texts: tuple[Tensor, ...]  # [L, D], one or two

    @property
    def grids(self) -> list[tuple[int, int]]:
        return [(height // 16, width // 16) for width, height in self.sizes]

    @property
    def target_tokens(self) -> int:
        return self.grids[0][0] * self.grids[0][1]


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    config = QwenImageConfig(num_layers=options.layers, num_attention_heads=options.heads)
    theirs = build_reference(config, device, dtype)
    heads = (config.num_attention_heads, config.attention_head_dim)
    attention = select_attention(options.attention, device, dtype, *heads)
    ceilings = machine.ceilings(attention, *heads, device)
    details = {"attention": attention.name, "layers": options.layers, "ceilings": ceilings}
    meta = machine.meta() | details
    print(json.dumps(meta, indent=1), flush=True)

    records: list[dict[str, Any]] = []
    for checkpoint in options.checkpoints:
        zero_cond_t = CHECKPOINTS[checkpoint]
        for module in (theirs, *theirs.transformer_blocks):
            module.zero_cond_t = zero_cond_t
        samplers = {}
        for impl in options.impls:
            samplers[impl] = build_sampler(replace(config, zero_cond_t=zero_cond_t), theirs, attention, options)
            if impl == "ditpack-fp8":
                quantize_blocks(samplers[impl].transformer.transformer_blocks)
        for side, mix, guided in product(options.sides, options.mixes, options.guidance):
            cases = make_cases(MIXES[mix], side, guided, config, device, dtype)
            record = {"checkpoint": checkpoint, "side": side, "mix": mix, "guidance": SCALE if guided else 1.0}
            for found in measure(theirs, samplers, cases, config, ceilings, options.repeats):
                records.append(record | found)
                print("  ".join(f"{key} {value}" for key, value in records[-1].items()), flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps({"meta": meta, "records": records}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument(
        "--sides", type=int, nargs="+", default=[512, 1024], help="images have about this number of pixels, squared"
    )
    parser.add_argument("--impls", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=["mixed"])
    parser.add_argument("--checkpoints", nargs="+", choices=CHECKPOINTS, default=list(CHECKPOINTS))
    parser.add_argument(
        "--guidance", nargs="+", type=lambda text: text == "on", default=[False, True], metavar="off|on"
    )
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs for small packs"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def make_cases(
    mix: list[tuple[float, ...]],
    side: int,
    guided: bool,
    config: QwenImageConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Case]:
    """Random inputs. A prompt has its words and, as in Edit-Plus, the tokens of each image at 3/8 of ``side``."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator).to(device, dtype)

    cases = []
    for aspects in mix:
        references = [scaled(side, aspect) for aspect in aspects]
        sizes = (references[-1], *references)
        image_tokens = sum(width // 16 * (height // 16) for width, height in sizes)
        shown = (scaled(side * 3 // 8, aspect) for aspect in aspects)
        text_tokens = sum(round(width / 28) * round(height / 28) for width, height in shown)
        words = (PROMPT_TOKENS, NEGATIVE_TOKENS) if guided else (PROMPT_TOKENS,)
        texts = tuple(draw(text_tokens + count, config.joint_attention_dim) for count in words)
        cases.append(Case(sizes, draw(image_tokens, config.in_channels), texts))
    return cases


@torch.inference_mode()
def measure(
    theirs: QwenImageTransformer2DModel,
    samplers: Mapping[str, QwenImageSampler],
    cases: list[Case],
    config: QwenImageConfig,
    ceilings: dict[str, float],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """A record of each sampler, all beside the same run of diffusers."""
    serial_ms = machine.milliseconds(lambda: serial(theirs, cases), repeats)
    expected = serial(theirs, cases)
    linear, attention = flops(cases, config)
    floor = linear / ceilings["matmul_tflops"] + attention / ceilings["attention_tflops"]
    for impl, sampler in samplers.items():
        packed = ditpack(sampler, cases)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        packed_ms = machine.milliseconds(packed, repeats, warmup=3)
        apart = max(
            float((o.float() - e.float()).norm() / e.float().norm()) for o, e in zip(packed(), expected, strict=True)
        )
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        yield {
            "impl": impl,
            "tokens": sum(len(case.image) + len(text) for case in cases for text in case.texts),
            "diffusers_ms": round(serial_ms, 3),
            "ditpack_ms": round(packed_ms, 3),
            "ratio": round(serial_ms / packed_ms, 3),
            "tflops": round((linear + attention) / packed_ms / 1e9, 1),
            "floor_share": round(floor / 1e9 / packed_ms, 4),
            "apart": float(f"{apart:.3g}"),
            "peak_gib": peak and round(peak, 2),
        }


def serial(model: QwenImageTransformer2DModel, cases: list[Case]) -> list[Tensor]:
    """diffusers one edit at a time, one forward a branch, as ``QwenImageEditPlusPipeline`` takes a step."""
    out = []
    for case in cases:
        shapes = [[(1, *grid) for grid in case.grids]]
        sigma = torch.full((1,), SIGMA, dtype=case.image.dtype, device=case.image.device)
        branches = []
        for text in case.texts:
            predicted = model(
                case.image[None], encoder_hidden_states=text[None], timestep=sigma, img_shapes=shapes, return_dict=False
            )[0]
            branches.append(predicted[0, : case.target_tokens])
        scale = torch.full((case.target_tokens, 1), SCALE, device=case.image.device)
        out.append(true_cfg(branches[0].float(), branches[1].float(), scale) if len(branches) == 2 else branches[0])
    return out


def ditpack(sampler: QwenImageSampler, cases: list[Case]) -> Callable[[], list[Tensor]]:
    """One packed forward with guidance, as the sampler's step takes it; the pack is built once, here."""
    members = []
    for index, case in enumerate(cases):
        guided = len(case.texts) == 2
        (width, height), *references = case.sizes
        request = replace(
            image_request(width, height, 50, SCALE if guided else 1.0, index),
            references=tuple(Reference(*size, "") for size in references),
        )
        latents = case.image[case.target_tokens :]
        member = sampler.begin(request, Conditioning(case.texts[0], case.texts[1] if guided else None, latents))
        member.sigmas = [SIGMA] * 51  # both get the same timestep
        member.latents = case.image[: case.target_tokens].float()
        members.append(member)
    pack = sampler.pack(members)
    assert pack.members == members
    return lambda: list(sampler.velocity(pack).split([len(member.latents) for member in members]))


if __name__ == "__main__":
    main()
