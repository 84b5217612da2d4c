"""The whole sampler on the GPU: packs against fp32 on the CPU, graphs against eager steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from engine_tools import conditioning, request

from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import load_sampler
from ditpack.models.quantized import quantize_blocks
from ditpack.request import ImageRequest
from ditpack.sampling.qwen_image import QwenImageSampler

REQUESTS = [
    request(num_inference_steps=6),
    request(seed=2, width=96, num_inference_steps=6, true_cfg_scale=1.0, prompt="two hearts"),
    request(seed=3, height=160, num_inference_steps=8, prompt="a broccoli on the left"),
]


def denoise(sampler: QwenImageSampler, requests: list[ImageRequest]) -> list[torch.Tensor]:
    members = [sampler.begin(r, conditioning(r, sampler.transformer.config.joint_attention_dim)) for r in requests]
    while active := [member for member in members if member.steps_left]:
        pack = sampler.pack(active)
        for _ in range(pack.steps_left):
            sampler.step(pack)
            sampler.throttle()
    return [sampler.finish(member)() for member in members]


def load(path: Path, device: str, dtype: torch.dtype) -> QwenImageSampler:
    return load_sampler(open_checkpoint(path), torch.device(device), dtype)


def test_fp32_on_the_gpu_equals_the_cpu(embedded_checkpoint: Path) -> None:
    expected = denoise(load(embedded_checkpoint, "cpu", torch.float32), REQUESTS)
    ours = denoise(load(embedded_checkpoint, "cuda", torch.float32), REQUESTS)
    for a, b in zip(ours, expected, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-3


@pytest.mark.parametrize("fp8", [False, True])
def test_half_precision_is_near_fp32(fp8: bool, embedded_checkpoint: Path) -> None:
    """The velocity of a first step from the same noise, whose timestep is the same in bf16."""
    velocities = []
    for sampler in (load(embedded_checkpoint, "cpu", torch.float32), load(embedded_checkpoint, "cuda", torch.bfloat16)):
        if fp8 and sampler.dtype == torch.bfloat16:
            quantize_blocks(sampler.transformer.transformer_blocks)
        width = sampler.transformer.config.joint_attention_dim
        members = [sampler.begin(r, conditioning(r, width)) for r in REQUESTS]
        for index, member in enumerate(members):
            noise = torch.randn(member.latents.shape, generator=torch.Generator().manual_seed(index))
            member.latents = noise.to(sampler.device)
        before = [member.latents for member in members]
        sampler.step(sampler.pack(members))
        velocities.append([((member.latents - old) / (member.sigmas[1] - member.sigmas[0])).cpu()
                           for member, old in zip(members, before, strict=True)])  # fmt: skip
    for exact, ours in zip(*velocities, strict=True):
        assert float((ours - exact).norm() / exact.norm()) < (0.15 if fp8 else 0.03)


def test_graphs_equal_eager_steps(embedded_checkpoint: Path) -> None:
    sampler = load(embedded_checkpoint, "cuda", torch.bfloat16)
    if not sampler._graph_tokens:
        pytest.skip("no attention backend that graphs can hold")
    first = denoise(sampler, REQUESTS)  # captures at the third step of a bucket
    assert sampler.graphs.replays > 0
    replays = sampler.graphs.replays
    again = denoise(sampler, REQUESTS)
    assert sampler.graphs.replays > replays + 6
    sampler._graph_tokens = 0
    eager = denoise(sampler, REQUESTS)
    for a, b, c in zip(first, again, eager, strict=True):
        assert float((a - c).norm() / c.norm()) < 2e-2
        assert float((b - c).norm() / c.norm()) < 2e-2


def test_unguided_packs_from_graphs(embedded_checkpoint: Path) -> None:
    """Nothing follows the conditional rows but padding, which must not reach the latents."""
    sampler = load(embedded_checkpoint, "cuda", torch.bfloat16)
    unguided = [request(seed=4, num_inference_steps=6, true_cfg_scale=1.0)]
    (ours,) = denoise(sampler, unguided)
    sampler._graph_tokens = 0
    (eager,) = denoise(sampler, unguided)
    assert float((ours - eager).norm() / eager.norm()) < 2e-2


def test_one_graph_serves_other_rows(embedded_checkpoint: Path) -> None:
    """Same bucket, other sizes and texts: the replayed graph must not remember the rows it was captured with."""
    sampler = load(embedded_checkpoint, "cuda", torch.bfloat16)
    if not sampler._graph_tokens:
        pytest.skip("no attention backend that graphs can hold")
    denoise(sampler, REQUESTS[:1])
    other = [request(seed=9, width=32 + 48, height=64, num_inference_steps=6, prompt="something else")]
    replays = sampler.graphs.replays
    ours = denoise(sampler, other)
    assert sampler.graphs.replays == replays + 6
    sampler._graph_tokens = 0
    (eager,) = denoise(sampler, other)
    assert float((ours[0] - eager).norm() / eager.norm()) < 2e-2
