"""Edits with ``zero_cond_t`` on the GPU: the kernels read two modulations a row, and graphs hold reference images."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from engine_tools import conditioning, request

from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import load_sampler
from ditpack.request import ImageRequest, Reference
from ditpack.sampling.qwen_image import Conditioning, QwenImageSampler

REQUESTS = [
    request(num_inference_steps=6),
    request(seed=2, num_inference_steps=6, true_cfg_scale=1.0, references=(Reference(96, 32, ""),)),
    request(seed=3, num_inference_steps=8, references=(Reference(64, 64, ""), Reference(32, 128, ""))),
]


def condition(r: ImageRequest, sampler: QwenImageSampler) -> Conditioning:
    text = conditioning(r, sampler.transformer.config.joint_attention_dim)
    tokens = sum(image.width // 16 * (image.height // 16) for image in r.references)
    latents = torch.randn(
        tokens, sampler.transformer.config.in_channels, generator=torch.Generator().manual_seed(r.seed)
    )
    return Conditioning(text.prompt_embeds, text.negative_prompt_embeds, latents)


def denoise(sampler: QwenImageSampler) -> list[torch.Tensor]:
    members = [sampler.begin(r, condition(r, sampler)) for r in REQUESTS]
    while active := [member for member in members if member.steps_left]:
        pack = sampler.pack(active)
        for _ in range(pack.steps_left):
            sampler.step(pack)
            sampler.throttle()
    return [sampler.finish(member)() for member in members]


def load(path: Path, device: str, dtype: torch.dtype) -> QwenImageSampler:
    return load_sampler(open_checkpoint(path), torch.device(device), dtype)


def test_fp32_on_the_gpu_equals_the_cpu(tiny_edit_2511_checkpoint: Path) -> None:
    expected = denoise(load(tiny_edit_2511_checkpoint, "cpu", torch.float32))
    ours = denoise(load(tiny_edit_2511_checkpoint, "cuda", torch.float32))
    for a, b in zip(ours, expected, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-3


def test_graphs_equal_eager_steps(tiny_edit_2511_checkpoint: Path) -> None:
    sampler = load(tiny_edit_2511_checkpoint, "cuda", torch.bfloat16)
    if not sampler._graph_tokens:
        pytest.skip("no attention backend that graphs can hold")
    captured = denoise(sampler)
    assert sampler.graphs.replays > 0
    sampler._graph_tokens = 0
    for a, b in zip(captured, denoise(sampler), strict=True):
        assert float((a - b).norm() / b.norm()) < 2e-2
