"""Triton-language kernels for ``models.sandwich``: one program a token, fp32 inside, rows looked up in the kernel."""

from __future__ import annotations

from torch import Tensor, nn

from ditpack.models.rotary import Rotary
from ditpack.models.triton_language import tl, triton


@triton.jit
def _add_norm_kernel(
    x, update, update_weight, gate, weight, scale, rows, out,
    gate_stride, scale_stride, width, update_eps, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = token * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        change = tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        change = change * tl.rsqrt(tl.sum(change * change, axis=0) / width + update_eps)
        change = change * tl.load(update_weight + column, mask=inside, other=0.0).to(tl.float32)
        gated = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        value += (2 * tl.sigmoid(2 * gated) - 1) * change  # tanh
        # The sum is kept rounded, and what follows sees the rounded value, as separate passes would.
        value = value.to(x.dtype.element_ty)
        tl.store(x + at, value, mask=inside)
        value = value.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1 + tl.load(scale + row * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (normed * factor).to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, waiting: tuple[Tensor, nn.RMSNorm, Tensor | None] | None, norm: nn.RMSNorm, scale: Tensor, rows: Tensor
) -> Tensor:
    """See ``sandwich.Stream.norm``: adds what waits to ``x``, in place. Scale and gate may have strided rows."""
    tokens, width = x.shape
    out = x.new_empty((tokens, width))
    update, update_norm, gate = waiting or (x, norm, scale)
    assert gate is not None, "where there is a scale, there is a gate"
    _add_norm_kernel[(tokens,)](
        x, update, update_norm.weight, gate, norm.weight, scale, rows, out,
        gate.stride(0), scale.stride(0), width, update_norm.eps, norm.eps,
        ADD=waiting is not None, BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _norm_rotate_kernel(
    x, weight, cos, sin,
    heads, half, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    even = x + (token * heads + head) * (2 * half) + 2 * pair
    a = tl.load(even, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(even + 1, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * half) + eps)[:, None]
    wide = pair < half
    a = a * factor * tl.load(weight + 2 * pair, mask=wide, other=0.0).to(tl.float32)
    b = b * factor * tl.load(weight + 2 * pair + 1, mask=wide, other=0.0).to(tl.float32)
    # Rounded once here, because the reference norms into the model's dtype before it rotates.
    a = a.to(x.dtype.element_ty).to(tl.float32)
    b = b.to(x.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + token * half + pair, mask=wide, other=0.0)
    s = tl.load(sin + token * half + pair, mask=wide, other=0.0)
    tl.store(even, (a * c - b * s).to(x.dtype.element_ty), mask=inside)
    tl.store(even + 1, (a * s + b * c).to(x.dtype.element_ty), mask=inside)


def norm_rotate(x: Tensor, norm: nn.RMSNorm, rotary: Rotary) -> Tensor:
    """See ``sandwich.norm_rotate``: in place; ``x`` must be contiguous. Any even head size."""
    tokens, heads, head_dim = x.shape
    half = head_dim // 2
    _norm_rotate_kernel[(tokens,)](
        x, norm.weight, rotary.cos, rotary.sin,
        heads, half, norm.eps,
        HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(half),
        num_warps=8 if heads * half > 1024 else 4,
    )  # fmt: skip
    return x


@triton.jit
def _silu_mul_kernel(gate, x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded once here, as two passes would.
    value = (value * tl.sigmoid(value)).to(gate.dtype.element_ty).to(tl.float32)
    value = value * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(gate + at, value.to(gate.dtype.element_ty), mask=inside)


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See ``sandwich.silu_mul``: into ``gate``; both must be contiguous."""
    block = 4096
    _silu_mul_kernel[(triton.cdiv(gate.numel(), block),)](gate, x, gate.numel(), BLOCK=block, num_warps=8)
    return gate
