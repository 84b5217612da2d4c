"""``torch.nn.attention.varlen.varlen_attn``: the FlashAttention-2 kernel that ships with torch ≥ 2.10."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from ditpack.attention.backend import HALF, Backend, VarlenAttention
from ditpack.packing.layout import Layout


def _load() -> VarlenAttention:
    from torch.nn.attention.varlen import varlen_attn

    # 2.10 and 2.11 take equal head counts only; 2.12 has a switch for grouped queries.
    gqa_switch = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if grouped and not gqa_switch:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        options: dict[str, Any] = {"enable_gqa": True} if grouped and gqa_switch else {}
        cu_seqlens, longest = layout.cu_seqlens, layout.max_seqlen
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
        return out[0] if isinstance(out, tuple) else out

    return attend


TORCH_VARLEN = Backend("torch_varlen", _load, ("cuda",), HALF, min_capability=(8, 0))
