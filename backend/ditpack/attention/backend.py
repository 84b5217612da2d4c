"""What an attention backend is, and how it says what it can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ditpack.packing.layout import Layout

# (q, k, v, layout) → out. q and out are [T, heads, head_dim]; k and v are [T, kv_heads, head_dim] with heads a multiple
# of kv_heads; token t attends to every token of its own row and to nothing else. Scale 1 / sqrt(head_dim), not causal.
VarlenAttention = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """A chosen backend. ``reads_cu_seqlens``: lengths come from the device alone, so a captured graph may serve packs
    whose rows differ."""

    name: str
    reads_cu_seqlens: bool
    attend: VarlenAttention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return self.attend(q, k, v, layout)


HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel and the claims it makes; ``select`` checks the claims and then runs it once before believing them.

    ``load`` imports what the kernel needs and returns the function. It raises ImportError, with the way out where there
    is one, when a package is missing or too old.
    """

    name: str
    load: Callable[[], VarlenAttention]
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    min_capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    max_head_dim: int = 256
    reads_cu_seqlens: bool = True

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this backend cannot serve the combination by its own claims, or None."""
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {device.type}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        if head_dim > self.max_head_dim or head_dim % 8:
            return f"takes head sizes that are multiples of 8 up to {self.max_head_dim}, not {head_dim}"
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < self.min_capability:
            return f"needs compute capability {self.min_capability}, this device has {capability}"
        return None
