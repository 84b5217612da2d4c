"""Every installed attention backend against sdpa in fp32, and whether a row's bits depend on its neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ditpack.attention import select_attention
from ditpack.attention.sdpa import SDPA
from ditpack.attention.select import BACKENDS
from ditpack.packing.layout import Layout, Row, build_layout

CUDA = torch.device("cuda")
NAMES = [backend.name for backend in BACKENDS]
ROWS = [Row(40, ((32, 32),)), Row(3, ((5, 7),)), Row(40, ((64, 48),)), Row(1, ((1, 1),)), Row(40, ((32, 32),))]


def draw(layout: Layout, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, layout.tokens, 24, 128, generator=generator).bfloat16().cuda()


@pytest.mark.parametrize("name", NAMES)
def test_equals_sdpa(name: str) -> None:
    try:
        attention = select_attention(name, CUDA, torch.bfloat16, 24, 128)
    except ValueError as reason:
        pytest.skip(str(reason))
    layout = build_layout(ROWS, CUDA)
    q, k, v = draw(layout)
    exact = SDPA.load()(q.float(), k.float(), v.float(), layout)
    out = attention(q, k, v, layout).float()
    assert float((out - exact).norm() / exact.norm()) < 5e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_rows_bits_do_not_depend_on_the_pack(name: str) -> None:
    try:
        attention = select_attention(name, CUDA, torch.bfloat16, 24, 128)
    except ValueError as reason:
        pytest.skip(str(reason))
    layout = build_layout(ROWS, CUDA)
    qkv = draw(layout)
    packed = attention(*qkv, layout).split(layout.lengths)
    for index, row in enumerate(ROWS):
        alone = build_layout([row], CUDA)
        start = sum(layout.lengths[:index])
        q, k, v = (x[start : start + row.tokens].contiguous() for x in qkv)
        assert torch.equal(attention(q, k, v, alone), packed[index]), f"row {index} of {name}"


def test_auto_takes_a_varlen_kernel() -> None:
    assert select_attention("auto", CUDA, torch.bfloat16, 24, 128).reads_cu_seqlens
