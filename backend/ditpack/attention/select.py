"""Choosing the attention backend: the first that claims the case and then proves it on a small pack."""

from __future__ import annotations

import logging

import torch

from ditpack.attention.backend import Attention, Backend, VarlenAttention
from ditpack.attention.flash import FLASH2, FLASH3, FLASH4
from ditpack.attention.sdpa import CUDNN, SDPA
from ditpack.attention.torch_varlen import TORCH_VARLEN
from ditpack.packing.layout import Row, build_layout

logger = logging.getLogger(__name__)

# In the order `auto` tries them.
BACKENDS: tuple[Backend, ...] = (FLASH4, FLASH3, FLASH2, TORCH_VARLEN, CUDNN, SDPA)
NAMES = ("auto", *(backend.name for backend in BACKENDS))

_PROBE_TOLERANCE = 2e-2  # relative, for half precision; a wrong kernel or a leak between rows is off by about 1


def select_attention(
    name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, kv_heads: int | None = None
) -> Attention:
    """The attention for this device, dtype and head shape; logs the choice and what was passed over.

    Args:
        name: ``auto`` or the name of one backend, which is then used or refused.
        kv_heads: heads of keys and values, None = as many as those of queries.

    Raises:
        ValueError: for an unknown name, or a named backend that cannot serve the case; says why.
    """
    if name not in NAMES:
        raise ValueError(f"attention = {name!r}: must be one of {', '.join(NAMES)}")
    refusals: list[str] = []
    for backend in BACKENDS if name == "auto" else [b for b in BACKENDS if b.name == name]:
        attention, reason = _probe(backend, device, dtype, heads, kv_heads or heads, head_dim)
        if attention is not None:
            passed_over = f" (passed over: {'; '.join(refusals)})" if refusals else ""
            logger.info("attention backend: %s%s", backend.name, passed_over)
            return Attention(backend.name, backend.reads_cu_seqlens, attention)
        refusals.append(f"{backend.name} {reason}")
    raise ValueError(f"attention = {name!r}: {'; '.join(refusals)}")


def _probe(
    backend: Backend, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> tuple[VarlenAttention | None, str]:
    """Load the backend and compare it with sdpa on two rows of unequal length; importable does not mean usable."""
    if reason := backend.refusal(device, dtype, head_dim):
        return None, reason
    try:
        attention = backend.load()
    except ImportError as error:
        return None, f"is not installed ({error})"
    if backend is SDPA:
        return attention, ""
    layout = build_layout([Row(3, ((5, 7),)), Row(20, ((12, 12),))], device)
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v = (
        torch.randn((layout.tokens, count, head_dim), generator=generator).to(device, dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    try:
        out = attention(q, k, v, layout).float()
        exact = SDPA.load()(q.float(), k.float(), v.float(), layout)
        off = ((out - exact).norm() / exact.norm()).item()
    except Exception as failure:  # whatever a kernel raises here is the reason it is not used
        return None, f"failed its trial run ({type(failure).__name__}: {str(failure).partition(chr(10))[0]})"
    if not off <= _PROBE_TOLERANCE:
        return None, f"gave wrong results in its trial run (relative error {off:.2g})"
    return attention, ""
