"""flash-attn 2, 3 and 4: variable-length kernels over cu_seqlens, one call for the whole pack.

Arguments go by name: the three generations order them differently (the fourth positional of 4 is ``qv``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ditpack.attention.backend import HALF, Backend, VarlenAttention
from ditpack.packing.layout import Layout


def _varlen(layout: Layout) -> dict[str, Any]:
    return {
        "cu_seqlens_q": layout.cu_seqlens,
        "cu_seqlens_k": layout.cu_seqlens,
        "max_seqlen_q": layout.max_seqlen,
        "max_seqlen_k": layout.max_seqlen,
    }


def _load_flash2() -> VarlenAttention:
    from flash_attn import flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return flash_attn_varlen_func(q, k, v, **_varlen(layout))

    return attend


def _load_flash3() -> VarlenAttention:
    from flash_attn_interface import flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        # One split: a split chosen from the whole pack would let rows change each other's rounding.
        out = flash_attn_varlen_func(q, k, v, num_splits=1, **_varlen(layout))
        return out[0] if isinstance(out, tuple) else out  # older builds also return the log-sum-exp

    return attend


def _load_flash4() -> VarlenAttention:
    from flash_attn.cute import flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        out = flash_attn_varlen_func(q, k, v, num_splits=1, **_varlen(layout))
        return out[0] if isinstance(out, tuple) else out

    return attend


FLASH2 = Backend("flash2", _load_flash2, ("cuda",), HALF, min_capability=(8, 0))
FLASH3 = Backend("flash3", _load_flash3, ("cuda",), HALF, min_capability=(9, 0))
FLASH4 = Backend("flash4", _load_flash4, ("cuda",), HALF, min_capability=(9, 0), max_head_dim=128)
