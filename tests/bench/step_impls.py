"""The ways to take one denoising step of a mix: diffusers one by one, compiled or in buckets, a varlen loop, ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import QwenImageTransformer2DModel
from torch import Tensor

from ditpack.models.qwen_image import QwenImageTransformer, stored_name
from ditpack.models.weights import Part
from ditpack.request import ImageRequest
from ditpack.sampling.qwen_image import Conditioning, QwenImageSampler

TEXT_TOKENS = 40
SIGMA = 0.7


@dataclass(frozen=True)
class Case:
    """One request of a mix: its patch grid and the inputs of its rows, [S, C] and one or two of [L, D]."""

    grid: tuple[int, int]
    image: Tensor
    texts: tuple[Tensor, ...]


def image_request(width: int, height: int, steps: int, scale: float, seed: int) -> ImageRequest:
    """A resolved request; pixels."""
    return ImageRequest(
        prompt="",
        negative_prompt=" " if scale > 1 else None,
        width=width,
        height=height,
        num_inference_steps=steps,
        true_cfg_scale=scale,
        seed=seed,
        output_format="jpeg",
        response_format="bytes",
        deadline_ms=None,
        priority=2,
        accepted_ns=0,
    )


def make_cases(
    sizes: list[tuple[int, int]], guided: bool, config: Any, device: torch.device, dtype: torch.dtype
) -> list[Case]:
    """Random inputs; ``sizes`` are (width, height) in pixels. Negative prompts are shorter, as in life."""
    generator = torch.Generator("cpu").manual_seed(0)
    lengths = (TEXT_TOKENS, 6) if guided else (TEXT_TOKENS,)

    def draw(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator).to(device, dtype)

    return [
        Case(
            (height // 16, width // 16),
            draw(height // 16 * (width // 16), config.in_channels),
            tuple(draw(length, config.joint_attention_dim) for length in lengths),
        )
        for width, height in sizes
    ]


def share_weights(ours: QwenImageTransformer, theirs: QwenImageTransformer2DModel) -> None:
    """Give ``ours`` (on meta) the tensors of ``theirs``; only queries, keys and values are copied, into one."""
    parts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for key, tensor in theirs.state_dict().items():
        name = stored_name(key)
        if isinstance(name, Part):
            parts[name.name][name.index] = tensor
        else:
            parts[name][0] = tensor
    for name, tensors in parts.items():
        whole = tensors[0] if len(tensors) == 1 else torch.cat([tensors[i] for i in range(len(tensors))])
        owner = ours.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(whole, requires_grad=False))


def _theirs(model: QwenImageTransformer2DModel, cases: list[Case], branch: int) -> Tensor:
    """Cases of one grid as one batch, all rows of one text length: [n, S, C]."""
    image = torch.stack([case.image for case in cases])
    text = torch.stack([case.texts[branch] for case in cases])
    sigma = torch.full((len(cases),), SIGMA, dtype=image.dtype, device=image.device)
    shapes = [[(1, *case.grid)] for case in cases]
    return model(image, encoder_hidden_states=text, timestep=sigma, img_shapes=shapes, return_dict=False)[0]


def _guided(positive: Tensor, negative: Tensor) -> Tensor:
    combined = negative + 4.0 * (positive - negative)
    return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


def serial(model: QwenImageTransformer2DModel, cases: list[Case]) -> list[Tensor]:
    """diffusers one request at a time, one forward a branch, as its pipeline does."""
    out = []
    for case in cases:
        branches = [_theirs(model, [case], branch)[0] for branch in range(len(case.texts))]
        out.append(_guided(*branches) if len(branches) == 2 else branches[0])
    return out


def pairs(model: QwenImageTransformer2DModel, cases: list[Case]) -> list[Tensor]:
    """diffusers one request at a time, both branches of it in one batch.

    Zeros stand in for what the shorter prompt lacks, and there is no mask, which would cost extra: for its speed alone.
    """
    out = []
    for case in cases:
        longest = max(len(text) for text in case.texts)
        texts = tuple(F.pad(text, (0, 0, 0, longest - len(text))) for text in case.texts)
        branches = [Case(case.grid, case.image, (text,)) for text in texts]
        velocity = _theirs(model, branches, 0)
        out.append(_guided(*velocity) if len(velocity) == 2 else velocity[0])
    return out


def buckets(model: QwenImageTransformer2DModel, cases: list[Case]) -> list[Tensor]:
    """diffusers with requests of equal size in one batch, one forward a branch."""
    out: dict[int, Tensor] = {}
    for indices in _by_grid(cases).values():
        group = [cases[i] for i in indices]
        branches = [_theirs(model, group, branch) for branch in range(len(group[0].texts))]
        velocity = _guided(*branches) if len(branches) == 2 else branches[0]
        out.update(zip(indices, velocity, strict=True))
    return [out[i] for i in range(len(cases))]


def bucket_loop(sampler: QwenImageSampler, cases: list[Case]) -> Callable[[], list[Tensor]]:
    """A varlen forward for each group of equal size: the first form of mixed-size batching."""
    steps = [(indices, ditpack(sampler, [cases[i] for i in indices])) for indices in _by_grid(cases).values()]

    def step() -> list[Tensor]:
        out: dict[int, Tensor] = {}
        for indices, call in steps:
            out.update(zip(indices, call(), strict=True))
        return [out[i] for i in range(len(cases))]

    return step


def ditpack(sampler: QwenImageSampler, cases: list[Case]) -> Callable[[], list[Tensor]]:
    """One packed forward with guidance, as the sampler's step takes it; the pack is built once, here."""
    members = []
    for index, case in enumerate(cases):
        scale = 4.0 if len(case.texts) == 2 else 1.0
        request = ImageRequest(
            prompt="", negative_prompt=" " if scale > 1 else None, true_cfg_scale=scale, num_inference_steps=50,
            width=16 * case.grid[1], height=16 * case.grid[0], seed=index,
            output_format="png", response_format="bytes", deadline_ms=None, priority=2, accepted_ns=0,
        )  # fmt: skip
        member = sampler.begin(request, Conditioning(case.texts[0], case.texts[1] if scale > 1 else None))
        member.sigmas = [SIGMA] * 51  # every implementation gets the same timestep
        member.latents = case.image.float()
        members.append(member)
    pack = sampler.pack(members)

    @torch.inference_mode()
    def step() -> list[Tensor]:
        pack.next = 0
        return list(sampler.velocity(pack).split([len(member.latents) for member in pack.members]))

    return step


def _by_grid(cases: list[Case]) -> dict[tuple[int, int], list[int]]:
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        groups[case.grid].append(index)
    return groups


@contextmanager
def fp32_blocks(model: QwenImageTransformer2DModel) -> Iterator[None]:
    """While inside, ``model`` computes in fp32 from its bf16 weights, one module's weights widened at a time."""
    stored: dict[torch.nn.Parameter, Tensor] = {}

    def widen(module: torch.nn.Module, _args: Any) -> None:
        for parameter in module.parameters():
            stored[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(module: torch.nn.Module, _args: Any, _out: Any) -> None:
        for parameter in module.parameters():
            parameter.data = stored.pop(parameter)

    handles = []
    for module in (*model.transformer_blocks, model.img_in, model.txt_in, model.txt_norm, model.time_text_embed,
                   model.norm_out, model.proj_out):  # fmt: skip
        handles += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def exact(model: QwenImageTransformer2DModel, cases: list[Case]) -> list[Tensor]:
    """diffusers, accumulated in fp32, from the same bf16 weights and inputs."""
    wide = [Case(case.grid, case.image.float(), tuple(text.float() for text in case.texts)) for case in cases]
    with fp32_blocks(model):
        return serial(model, wide)
