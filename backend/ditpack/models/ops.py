"""The pointwise passes of a packed block, each one trip through memory on a GPU.

The functions here are the definition, in plain torch; on CUDA they hand over to the kernels of ``models.kernels``,
which the GPU tests hold against them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditpack.models import kernels
from ditpack.models.quantized import FP8, FP8_MAX, Activation, Fp8Linear, Quantized
from ditpack.models.rotary import Rotary, apply_rotary
from ditpack.packing.layout import Stream

EPS = 1e-6


def modulate(x: Tensor, shift: Tensor, scale: Tensor, stream: Stream, fp8: bool = False) -> Activation:
    """LayerNorm(x) · (1 + scale) + shift, with one shift and one scale [R, D] a row; x is the stream's [n, D]."""
    if kernels.usable(x):
        return kernels.modulate(x, None, None, shift, scale, stream.rows, fp8)
    normed = F.layer_norm(x, (x.shape[-1],), eps=EPS)
    # On views of the rows: no per-token copy of the modulation exists.
    for part, row_shift, row_scale in zip(normed.split(stream.lengths), shift, 1 + scale, strict=True):
        part.mul_(row_scale).add_(row_shift)
    return quantize(normed) if fp8 else normed


def add_modulate(
    x: Tensor, update: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, stream: Stream, fp8: bool = False
) -> Activation:
    """x += gate · update in place, then ``modulate(x, shift, scale)``; ``gate`` is [R, D] too."""
    if kernels.usable(x):
        return kernels.modulate(x, update, gate, shift, scale, stream.rows, fp8)
    for part, row_update, row_gate in zip(x.split(stream.lengths), update.split(stream.lengths), gate, strict=True):
        part.addcmul_(row_update, row_gate)
    return modulate(x, shift, scale, stream, fp8)


def quantize(x: Tensor, gelu: bool = False) -> Quantized:
    """``x`` [n, width], through GELU (tanh) if asked, each token scaled to e4m3's range."""
    if kernels.usable(x):
        return kernels.quantize(x, gelu)
    values = x.float()
    values = F.gelu(values, approximate="tanh") if gelu else values
    scale = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return Quantized((values / scale).to(FP8), scale, len(values))


def take(x: Tensor, slots: Tensor, fp8: bool) -> Activation:
    """The tokens ``slots`` of ``x`` [T, groups, width], which may be strided, as [n, groups · width]."""
    if kernels.usable(x):
        return kernels.take(x, slots, fp8)
    taken = x[slots].flatten(1)
    return quantize(taken) if fp8 else taken


def write_heads(
    qkv: Tensor, norm_q: Tensor, norm_k: Tensor, rotary: Rotary, stream: Stream, joint: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Norm and rotate a stream's queries and keys, and write them and the values to their places in the flat order.

    Args:
        qkv: [n, 3 · heads · head_dim], queries, keys, values.
        norm_q, norm_k: [head_dim], the weights of the RMS norms over each head.
        joint: where q, k and v of all tokens go, [T, heads, head_dim] each or, with the heads in groups that need not
            lie side by side, [T, groups, heads / groups, head_dim]; written at ``stream.slots``.
    """
    if kernels.usable(qkv):
        kernels.write_heads(qkv, norm_q, norm_k, rotary, stream.slots, joint)
        return
    head_dim = norm_q.shape[0]
    q, k, v = qkv.unflatten(-1, (3, -1, head_dim)).unbind(1)
    q = apply_rotary(F.rms_norm(q, (head_dim,), norm_q, EPS), rotary)
    k = apply_rotary(F.rms_norm(k, (head_dim,), norm_k, EPS), rotary)
    for target, heads in zip(joint, (q, k, v), strict=True):
        target[stream.slots] = heads.reshape(-1, *target.shape[1:])


def linear_gelu(layer: nn.Module, x: Activation) -> Activation:
    """GELU (tanh) of a linear layer; on CUDA in bf16 in the matrix multiplication's epilogue."""
    if isinstance(layer, Fp8Linear):
        return quantize(layer(x), gelu=True)
    assert isinstance(layer, nn.Linear)
    assert isinstance(x, Tensor)
    if x.is_cuda and len(x):
        return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
    return F.gelu(layer(x), approximate="tanh")
