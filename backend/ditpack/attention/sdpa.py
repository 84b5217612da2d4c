"""Exact attention with torch alone: one ``scaled_dot_product_attention`` call for each distinct row length.

Runs everywhere and in every dtype; the reference for all other backends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ditpack.attention.backend import HALF, Backend, VarlenAttention
from ditpack.packing.layout import Layout

_Sdpa = Callable[[Tensor, Tensor, Tensor], Tensor]


def _attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, sdpa: _Sdpa) -> Tensor:
    by_length: dict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(layout.lengths):
        by_length[length].append(row)
    queries, keys, values = (x.split(layout.lengths) for x in (q, k, v))
    out = torch.empty_like(q)
    outputs = out.split(layout.lengths)
    for rows in by_length.values():
        # [rows, heads, length, head_dim]
        batch = (torch.stack([x[row] for row in rows]).transpose(1, 2) for x in (queries, keys, values))
        attended = sdpa(*batch).transpose(1, 2)
        for row, result in zip(rows, attended, strict=True):
            outputs[row].copy_(result)
    return out


def _math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def _load(sdpa: _Sdpa) -> VarlenAttention:
    return partial(_attend, sdpa=sdpa)


SDPA = Backend(
    "sdpa",
    partial(_load, _math),
    ("cpu", "cuda"),
    (torch.float32, torch.float64, *HALF),
    max_head_dim=1024,
    reads_cu_seqlens=False,
)
CUDNN = Backend(
    "cudnn", partial(_load, _cudnn), ("cuda",), HALF, min_capability=(8, 0), max_head_dim=128, reads_cu_seqlens=False
)
