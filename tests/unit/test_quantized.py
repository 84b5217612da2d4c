"""8-bit layers on the CPU: what they replace, how far off they are, and that rows stay independent."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_tools import tiny_sampler
from torch import nn

from ditpack.models.ops import quantize
from ditpack.models.quantized import Fp8Linear, quantize_blocks
from ditpack.packing.layout import Row, build_layout

CPU = torch.device("cpu")
ROWS = [Row(5, ((3, 4),)), Row(9, ((4, 4),))]


def test_a_layer_is_within_the_format() -> None:
    """e4m3 has three bits of mantissa: each number is off by at most 1/16, a long sum by far less."""
    linear = nn.Linear(512, 256)
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    exact, ours = linear(x), Fp8Linear(linear)(quantize(x))
    assert 1e-4 < float(((ours - exact).norm() / exact.norm()).detach()) < 0.05


def test_tokens_of_zeros_stay_zero() -> None:
    assert not quantize(torch.zeros(3, 8)).values.float().any()


@torch.inference_mode()
def test_a_quantised_transformer(tiny_checkpoint: Path) -> None:
    model = tiny_sampler(tiny_checkpoint).transformer
    layout = build_layout(ROWS, CPU)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(28, model.config.in_channels, generator=generator)
    text = torch.randn(14, model.config.joint_attention_dim, generator=generator)
    modulation = model.modulation(torch.tensor([0.9, 0.3]))
    exact = model(image, text, modulation, layout, model.rotary(layout))
    quantize_blocks(model.transformer_blocks)
    kinds = {type(module) for name, module in model.transformer_blocks.named_modules() if "_mod." in name}
    assert Fp8Linear not in kinds
    assert sum(isinstance(module, Fp8Linear) for module in model.modules()) == 8 * len(model.transformer_blocks)
    ours = model(image, text, modulation, layout, model.rotary(layout))
    assert 1e-4 < float(((ours - exact).norm() / exact.norm()).detach()) < 0.2
    image[:12] = 7.0
    assert torch.equal(model(image, text, modulation, layout, model.rotary(layout))[12:], ours[12:])
