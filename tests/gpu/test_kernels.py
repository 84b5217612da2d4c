"""Each fused kernel against its definition in torch, computed in fp32 from the same bf16 inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ditpack.models import kernels, ops
from ditpack.models.quantized import Fp8Linear, Quantized
from ditpack.models.rotary import Rotary
from ditpack.packing.layout import Layout, Row, build_layout

ROWS = [Row(7, ((5, 9),)), Row(40, ((16, 16),)), Row(1, ((1, 1),)), Row(33, ((8, 12), (3, 4)))]
BF16_ROUNDING = 6e-3  # relative to the largest value: half a unit in the last place of bf16, and a rounding in between


@pytest.fixture
def layout() -> Layout:
    return build_layout(ROWS, torch.device("cuda"))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def close(ours: Tensor, exact: Tensor) -> bool:
    return bool((ours.float() - exact).abs().max() <= BF16_ROUNDING * exact.abs().max())


def on_cpu(layout: Layout) -> Layout:
    return build_layout(layout.rows, torch.device("cpu"))


@pytest.mark.parametrize("width", [64, 256, 3072])
def test_modulate(layout: Layout, width: int) -> None:
    x = draw(len(layout.image.rows), width)
    modulation = draw(len(ROWS), 3, 6, width, seed=1)[:, 1]  # strided, as in a step
    shift, scale = modulation[:, 0], modulation[:, 1]
    exact = ops.modulate(x.cpu().float(), shift.cpu().float(), scale.cpu().float(), on_cpu(layout).image)
    assert kernels.usable(x)
    assert close(ops.modulate(x, shift, scale, layout.image).cpu(), exact)


@pytest.mark.parametrize("width", [64, 256, 3072])
def test_add_modulate(layout: Layout, width: int) -> None:
    x, update = draw(len(layout.text.rows), width), draw(len(layout.text.rows), width, seed=2)
    gate, shift, scale = draw(len(ROWS), 3, width, seed=1).unbind(1)
    expected_x = x.cpu().float()
    arguments = [tensor.cpu().float() for tensor in (update, gate, shift, scale)]
    exact = ops.add_modulate(expected_x, *arguments, on_cpu(layout).text)
    out = ops.add_modulate(x, update, gate, shift, scale, layout.text)
    assert close(x.cpu(), expected_x)
    assert close(out.cpu(), exact)


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 16), (4, 64), (24, 128)])
def test_write_heads(layout: Layout, heads: int, head_dim: int) -> None:
    tokens = len(layout.image.rows)
    qkv = draw(tokens, 3 * heads * head_dim)
    norm_q, norm_k = draw(head_dim, seed=1), draw(head_dim, seed=2)
    positions = torch.arange(tokens * 3).view(tokens, 3) % 97 - 40
    axes = (head_dim // 2, head_dim // 4, head_dim // 4)
    expected = torch.zeros(3, layout.tokens, heads, head_dim)
    rotary = Rotary.from_positions(positions, axes)
    ops.write_heads(qkv.cpu().float(), norm_q.cpu().float(), norm_k.cpu().float(), rotary, on_cpu(layout).image,
                    tuple(expected.unbind(0)))  # fmt: skip
    joint = torch.zeros(3, layout.tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    ops.write_heads(qkv, norm_q, norm_k, Rotary.from_positions(positions.cuda(), axes), layout.image,
                    tuple(joint.unbind(0)))  # fmt: skip
    grouped = torch.zeros(2, layout.tokens, 3, heads // 2, head_dim, dtype=torch.bfloat16, device="cuda")
    parts = grouped.transpose(0, 1).unbind(2)  # two groups of heads, as two ranks exchange them
    ops.write_heads(qkv, norm_q, norm_k, Rotary.from_positions(positions.cuda(), axes), layout.image, parts)
    for ours, part, exact in zip(joint.cpu(), parts, expected, strict=True):
        assert close(ours, exact)
        assert torch.equal(part.cpu().flatten(1, 2), ours)


def test_linear_gelu() -> None:
    x, weight, bias = draw(300, 256), draw(1024, 256, seed=1) / 16, draw(1024, seed=2)
    linear = torch.nn.Linear(256, 1024)
    linear.weight.data, linear.bias.data = weight.cpu().float(), bias.cpu().float()
    exact = ops.linear_gelu(linear, x.cpu().float())
    linear.weight.data, linear.bias.data = weight, bias
    ours = ops.linear_gelu(linear, x)
    assert isinstance(ours, Tensor)
    assert close(ours.cpu(), exact)


@pytest.mark.parametrize("width", [256, 3072])
def test_modulate_to_fp8(layout: Layout, width: int) -> None:
    x = draw(len(layout.image.rows), width)
    shift, scale = draw(len(ROWS), 2, width, seed=1).unbind(1)
    exact = ops.modulate(x.cpu().float(), shift.cpu().float(), scale.cpu().float(), on_cpu(layout).image)
    out = ops.modulate(x, shift, scale, layout.image, fp8=True)
    assert isinstance(out, Quantized)
    assert float((dequantize(out) - exact).norm() / exact.norm()) < 0.04


@pytest.mark.parametrize("gelu", [False, True])
def test_quantize(gelu: bool) -> None:
    x = draw(300, 1024)
    exact = dequantize(ops.quantize(x.cpu().float(), gelu))
    ours = dequantize(ops.quantize(x, gelu))
    assert float((ours - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 24])
@pytest.mark.parametrize("tokens", [0, 100])
def test_take(tokens: int, groups: int, fp8: bool) -> None:
    x = draw(groups, 300, 3072 // groups).transpose(0, 1)
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:tokens].cuda()
    exact = x[slots].flatten(1)
    ours = ops.take(x, slots, fp8)
    if isinstance(ours, Quantized):
        expected = dequantize(ops.quantize(exact.cpu().float()))
        assert float((dequantize(ours) - expected).norm()) <= 0.01 * float(expected.norm())
    else:
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("tokens", [0, 1, 40, 96, 100])
def test_fp8_linear(tokens: int) -> None:
    linear = torch.nn.Linear(512, 384, device="cuda", dtype=torch.bfloat16)
    x = draw(tokens, 512)
    exact = linear(x).float().cpu()
    out = Fp8Linear(linear)(ops.quantize(x)).float().cpu()
    assert float((out - exact).norm()) <= 0.05 * float(exact.norm())


def dequantize(x: Quantized) -> Tensor:
    return (x.values.float() * x.scale)[: x.tokens].cpu()
