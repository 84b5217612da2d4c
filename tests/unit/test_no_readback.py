"""Law 4: the step loop never reads the device from the host.

The loop runs on the meta device, whose tensors have shapes and no values: whoever reads one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_tools import conditioning, request, tiny_sampler
from torch import Tensor

from ditpack.attention.sdpa import SDPA
from ditpack.models.qwen_image import QwenImageTransformer
from ditpack.sampling.qwen_image import QwenImageSampler


@pytest.fixture
def sampler(tiny_checkpoint: Path) -> QwenImageSampler:
    real = tiny_sampler(tiny_checkpoint)
    with torch.device("meta"):
        transformer = QwenImageTransformer(real.transformer.config, SDPA.load())
    return QwenImageSampler(transformer, real.schedule, real.pixels_per_patch)


def denoise(sampler: QwenImageSampler) -> None:
    """Begin, pack and step three mixed requests, one leaving early, as the engine does."""
    requests = [
        request(num_inference_steps=2),
        request(width=32, num_inference_steps=4, true_cfg_scale=1.0),
        request(height=96, num_inference_steps=4),
    ]
    members = [sampler.begin(image_request, conditioning(image_request)) for image_request in requests]
    while active := [member for member in members if member.steps_left]:
        pack = sampler.pack(active)
        for _ in range(pack.steps_left):
            sampler.step(pack)
            sampler.throttle()


def test_nothing_is_read(sampler: QwenImageSampler) -> None:
    denoise(sampler)


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "any": lambda x: bool((x == 0).any()),
    "truth": lambda x: not x.sum(),
    "int": lambda x: int(x.sum()),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x[x > 0].shape[0] + 0,
}


@pytest.mark.parametrize("read", READS)
def test_this_test_can_fail(read: str, sampler: QwenImageSampler) -> None:
    sampler.transformer.proj_out.register_forward_hook(lambda _module, _args, out: READS[read](out) and None)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        denoise(sampler)
