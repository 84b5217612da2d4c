"""Triton-language kernels for the pointwise passes of ``models.ops``: one program a token, fp32 inside.

Rows are looked up in the kernel, so modulation is never copied per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ditpack.models.quantized import FP8, Activation, Quantized
from ditpack.models.rotary import Rotary
from ditpack.models.triton_language import INSTALLED, tl, triton


def usable(x: Tensor) -> bool:
    """Whether the kernels can run on ``x``."""
    return INSTALLED and x.is_cuda


@triton.jit
def _modulate_kernel(
    x, update, gate, shift, scale, rows, out, out_scale,
    gate_stride, shift_stride, scale_stride,
    width, eps,
    ADD: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = token * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        gated = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        value += gated * tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        # The sum is kept rounded, and what follows sees the rounded value, as separate passes would.
        value = value.to(x.dtype.element_ty)
        tl.store(x + at, value, mask=inside)
        value = value.to(tl.float32)
    mean = tl.sum(value, axis=0) / width
    centred = tl.where(inside, value - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / width
    normed = centred * tl.rsqrt(variance + eps)
    factor = 1 + tl.load(scale + row * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + row * shift_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = normed * factor + offset
    if FP8:
        _store_fp8(out, out_scale, token, at, inside, result)
    else:
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_fp8(out, out_scale, token, at, inside, value):
    """Scale a token to e4m3's range, which ends at 448, and keep the scale."""
    largest = tl.maximum(tl.max(tl.abs(tl.where(inside, value, 0.0)), axis=0), 1e-12)
    tl.store(out_scale + token, largest / 448.0)
    tl.store(out + at, (value * (448.0 / largest)).to(out.dtype.element_ty), mask=inside)


def modulate(
    x: Tensor, update: Tensor | None, gate: Tensor | None, shift: Tensor, scale: Tensor, rows: Tensor, fp8: bool
) -> Activation:
    """See ``ops.modulate`` and, with an ``update``, ``ops.add_modulate``. The modulation's rows may be strided."""
    tokens, width = x.shape
    quantized = _empty_quantized(tokens, width, x.device) if fp8 else None
    out = torch.empty_like(x) if quantized is None else quantized.values
    out_scale = out if quantized is None else quantized.scale
    gate = shift if gate is None else gate
    _modulate_kernel[(tokens,)](
        x, x if update is None else update, gate, shift, scale, rows, out, out_scale,
        gate.stride(0), shift.stride(0), scale.stride(0),
        width, 1e-6,
        ADD=update is not None, FP8=fp8, BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 4,
    )  # fmt: skip
    return quantized or out


def _empty_quantized(tokens: int, width: int, device: torch.device) -> Quantized:
    padded = -(-tokens // 16) * 16
    values = torch.empty((padded, width), dtype=FP8, device=device)
    return Quantized(values, torch.empty((padded, 1), dtype=torch.float32, device=device), tokens)


@triton.jit
def _take_kernel(
    x, slots, out, out_scale,
    token_stride, group_stride, width,
    GROUP: tl.constexpr, GATHER: tl.constexpr, GELU: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    source = tl.load(slots + token) if GATHER else token
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = source * token_stride + column // GROUP * group_stride + column % GROUP
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = 0.5 * value * (2 * tl.sigmoid(2 * inner))  # 1 + tanh(z) = 2 sigmoid(2z)
    if FP8:
        _store_fp8(out, out_scale, token, token * width + column, inside, value)
    else:
        tl.store(out + token * width + column, value.to(out.dtype.element_ty), mask=inside)


def quantize(x: Tensor, gelu: bool) -> Quantized:
    """See ``ops.quantize``."""
    tokens, width = x.shape
    quantized = _empty_quantized(tokens, width, x.device)
    _take_kernel[(tokens,)](
        x, x, quantized.values, quantized.scale,
        width, width, width,
        GROUP=width, GATHER=False, GELU=gelu, FP8=True, BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width > 1024 else 4,
    )  # fmt: skip
    return quantized


def take(x: Tensor, slots: Tensor, fp8: bool) -> Activation:
    """See ``ops.take``. The last dimension of ``x`` must be dense."""
    tokens, width, group = slots.shape[0], x.shape[1] * x.shape[2], x.shape[2]
    quantized = _empty_quantized(tokens, width, x.device) if fp8 else None
    out = x.new_empty((tokens, width)) if quantized is None else quantized.values
    _take_kernel[(tokens,)](
        x, slots, out, out if quantized is None else quantized.scale,
        x.stride(0), x.stride(1), width,
        GROUP=group, GATHER=True, GELU=False, FP8=fp8, BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width > 1024 else 4,
    )  # fmt: skip
    return out if quantized is None else quantized


@triton.jit
def _write_heads_kernel(
    qkv, norm_q, norm_k, cos, sin, slots, q, k, v,
    heads, group, token_stride, group_stride, eps,
    HEAD_DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    half = tl.arange(0, HEAD_DIM // 2)
    inside = (head < heads) & (dim < HEAD_DIM)
    at = head * HEAD_DIM + dim
    source = qkv + token * heads * HEAD_DIM * 3
    target = slot * token_stride + head // group * group_stride + head % group * HEAD_DIM + dim
    c = tl.load(cos + token * (HEAD_DIM // 2) + half)[None, :]
    s = tl.load(sin + token * (HEAD_DIM // 2) + half)[None, :]
    for part in tl.static_range(2):
        norm = norm_q if part == 0 else norm_k
        out = q if part == 0 else k
        x = tl.load(source + part * heads * HEAD_DIM + at, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None] * tl.load(norm + dim).to(tl.float32)
        # Rounded once here, because the reference norms into the model's dtype before it rotates in fp32.
        x = x.to(q.dtype.element_ty).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (HEADS, HEAD_DIM // 2, 2)))
        rotated = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (HEADS, HEAD_DIM))
        tl.store(out + target, rotated.to(q.dtype.element_ty), mask=inside)
    tl.store(v + target, tl.load(source + 2 * heads * HEAD_DIM + at, mask=inside), mask=inside)


def write_heads(
    qkv: Tensor, norm_q: Tensor, norm_k: Tensor, rotary: Rotary, slots: Tensor, joint: tuple[Tensor, Tensor, Tensor]
) -> None:
    """See ``ops.write_heads``. The head size must be a power of two; q, k and v have the same strides."""
    group, head_dim = joint[0].shape[-2:]
    heads = qkv.shape[1] // (3 * head_dim)
    _write_heads_kernel[(qkv.shape[0],)](
        qkv, norm_q, norm_k, rotary.cos, rotary.sin, slots, *joint,
        heads, group, joint[0].stride(0), joint[0].stride(1) if joint[0].dim() == 4 else 0, 1e-6,
        HEAD_DIM=head_dim, HEADS=triton.next_power_of_2(heads), num_warps=8 if heads * head_dim > 1024 else 4,
    )  # fmt: skip
