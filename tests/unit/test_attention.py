"""Attention over packed rows: exact, row by row, and chosen by what a backend proves."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ditpack.attention import select, select_attention
from ditpack.attention.sdpa import SDPA
from ditpack.packing.layout import Layout, Row, build_layout

CPU = torch.device("cpu")
LAYOUT = build_layout([Row(3, ((4, 4),)), Row(9, ((2, 5),)), Row(1, ((1, 1),)), Row(4, ((3, 5),))], CPU)


def packed(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(LAYOUT.tokens, h, 16, generator=generator) for h in (heads, kv_heads, kv_heads))  # type: ignore[return-value]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_sdpa_attends_within_rows_only(heads: int, kv_heads: int) -> None:
    q, k, v = packed(heads, kv_heads)
    out = SDPA.load()(q, k, v, LAYOUT)
    rows = [torch.full((length,), row) for row, length in enumerate(LAYOUT.lengths)]
    row_of = torch.cat(rows)
    mask = row_of[:, None] == row_of[None, :]
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    expected = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask)[
        0
    ].transpose(0, 1)
    assert torch.allclose(out, expected, atol=1e-6)


def test_auto_on_a_cpu_is_sdpa_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        select_attention("auto", CPU, torch.float32, 4, 16)
    (record,) = caplog.records
    assert record.getMessage().startswith("attention backend: sdpa")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="must be one of auto, flash4, flash3, flash2, torch_varlen, cudnn, sdpa"):
        select_attention("flash5", CPU, torch.float32, 4, 16)


def test_a_forced_backend_is_used_or_refused() -> None:
    with pytest.raises(ValueError, match="flash2 runs on cuda, not on cpu"):
        select_attention("flash2", CPU, torch.float32, 4, 16)


def leaky(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)


def broken(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(("kernel", "reason"), [(leaky, "wrong results"), (broken, "no kernel image is available")])
def test_importable_is_not_usable(monkeypatch: pytest.MonkeyPatch, kernel: object, reason: str) -> None:
    """A backend that ignores row borders, or fails at its first launch, is found out before it serves anybody."""
    bad = replace(SDPA, name="bad", load=lambda: kernel)
    monkeypatch.setattr(select, "BACKENDS", (bad, SDPA))
    monkeypatch.setattr(select, "NAMES", ("auto", "bad", "sdpa"))
    with pytest.raises(ValueError, match=reason):
        select_attention("bad", CPU, torch.float32, 4, 16)
    q, k, v = packed(4, 4)
    chosen = select_attention("auto", CPU, torch.float32, 4, 16)
    assert torch.equal(chosen(q, k, v, LAYOUT), SDPA.load()(q, k, v, LAYOUT))


def ungrouped(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v))  # 0, 1, 0, 1, … instead of 0, 0, …, 1, 1, …
    return SDPA.load()(q, k, v, layout)


def test_a_backend_that_shares_the_wrong_heads_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", (replace(SDPA, name="bad", load=lambda: ungrouped), SDPA))
    assert select_attention("auto", CPU, torch.float32, 6, 16, kv_heads=6).name == "bad"
    assert select_attention("auto", CPU, torch.float32, 6, 16, kv_heads=2).name == "sdpa"
