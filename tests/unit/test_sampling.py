"""Schedules, guidance and latents against the reference and its published numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from ditpack.sampling.flow_match import FlowMatchSchedule
from ditpack.sampling.guidance import true_cfg
from ditpack.sampling.latents import pack_latents, seeded_noise, unpack_latents

QWEN_IMAGE = {
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}
LIGHTNING = {**QWEN_IMAGE, "base_shift": float(np.log(3)), "max_shift": float(np.log(3)), "shift_terminal": None}
STATIC = {**QWEN_IMAGE, "use_dynamic_shifting": False, "shift": 3.0, "shift_terminal": None}
LINEAR = {**QWEN_IMAGE, "time_shift_type": "linear"}


@pytest.mark.parametrize("config", [QWEN_IMAGE, LIGHTNING, STATIC, LINEAR])
@pytest.mark.parametrize("steps", [2, 3, 4, 8, 50, 200])
@pytest.mark.parametrize("tokens", [16, 1024, 4096, 6889, 16384])
def test_sigmas_equal_the_reference(config: dict[str, object], steps: int, tokens: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    mu = calculate_shift(tokens, 256, 8192, scheduler.config.base_shift, scheduler.config.max_shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    ours = FlowMatchSchedule.from_config(config).sigmas(steps, tokens)
    assert ours == scheduler.sigmas.tolist()


def test_sigmas_of_the_published_table() -> None:
    schedule = FlowMatchSchedule.from_config(QWEN_IMAGE)
    four = schedule.sigmas(4, 4096)
    assert four == pytest.approx([1, 0.76671, 0.45561, 0.02, 0], abs=5e-6)
    fifty = schedule.sigmas(50, 4096)
    assert fifty[:3] == pytest.approx([1, 0.98970, 0.97919], abs=5e-6)
    assert fifty[-4:] == pytest.approx([0.09550, 0.05848, 0.02, 0], abs=5e-6)
    for tokens, mu in [(1024, 0.538710), (3072, 0.641935), (4096, 0.693548), (6889, 0.834325), (16384, 1.312903)]:
        assert schedule._mu(tokens) == pytest.approx(mu, abs=1e-6)


def test_a_single_step_is_finite() -> None:
    """diffusers divides by zero here when there is a terminal shift."""
    assert FlowMatchSchedule.from_config(QWEN_IMAGE).sigmas(1, 4096) == [1.0, 0.0]


@pytest.mark.parametrize("key", ["use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas"])
def test_other_schedules_are_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        FlowMatchSchedule.from_config({**QWEN_IMAGE, key: True})


def test_guidance_equals_the_reference_formula() -> None:
    positive, negative = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(0))
    combined = negative + 4.0 * (positive - negative)
    expected = combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
    assert torch.allclose(true_cfg(positive, negative, torch.full((10, 1), 4.0)), expected, atol=1e-6)


def test_guidance_scales_are_per_token() -> None:
    positive, negative = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([[1.5], [2.0], [4.0], [9.0]])
    together = true_cfg(positive, negative, scales)
    for i in range(4):
        assert torch.equal(together[i : i + 1], true_cfg(positive[i : i + 1], negative[i : i + 1], scales[i : i + 1]))


def test_a_combination_of_zero_is_guarded() -> None:
    positive = torch.ones(2, 4)
    negative = torch.tensor([[2.0] * 4, [0.0] * 4])  # with scale 2: 2 + 2(1 - 2) = 0 and 0 + 2(1 - 0) = 2
    out = true_cfg(positive, negative, torch.full((2, 1), 2.0))
    assert torch.equal(out[0], torch.zeros(4))
    assert torch.allclose(out[1], torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", [(2, 3), (3, 2), (8, 8)])
def test_noise_and_packing_equal_the_reference(dtype: torch.dtype, grid: tuple[int, int]) -> None:
    height, width = grid
    generator = torch.Generator().manual_seed(11)
    latents = torch.randn((1, 1, 16, 2 * height, 2 * width), generator=generator, dtype=dtype)
    packed = QwenImagePipeline._pack_latents(latents, 1, 16, 2 * height, 2 * width)
    assert torch.equal(seeded_noise(11, 16, grid, dtype), packed[0])
    assert torch.equal(unpack_latents(packed[0], grid), latents[0, 0])
    assert torch.equal(pack_latents(latents[0, 0]), packed[0])
