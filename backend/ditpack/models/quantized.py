"""8-bit floating point: activations with a scale a token, weights with a scale an output channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Quantized:
    """``values`` [n, width] in e4m3 and ``scale`` [n, 1] in fp32; their product is the activation of ``tokens`` tokens.

    On a GPU n is a multiple of 16, as the matrix multiplication wants it; what lies behind the tokens is not defined.
    """

    values: Tensor
    scale: Tensor
    tokens: int


Activation = Tensor | Quantized


class Fp8Linear(nn.Module):
    """A linear layer with e4m3 weights, quantised from ``linear`` once; takes quantised activations."""

    weight: Tensor  # e4m3 [out, in]
    scale: Tensor  # fp32 [1, out]
    bias: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values = linear.weight.float()
        scale = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / FP8_MAX
        self.register_buffer("weight", (values / scale).to(FP8))
        self.register_buffer("scale", scale.t().contiguous())
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: Quantized) -> Tensor:
        """[tokens, in] → [tokens, out] in the bias's dtype, accumulated in fp32."""
        if not x.tokens:  # as on a rank that holds none of a stream
            return self.bias.new_empty((0, len(self.bias)))
        if x.values.is_cuda:
            product = torch._scaled_mm(
                x.values,
                self.weight.t(),
                scale_a=x.scale,
                scale_b=self.scale,
                bias=self.bias,
                out_dtype=self.bias.dtype,
                use_fast_accum=True,
            )
            return product[: x.tokens]
        product = (x.values.float() * x.scale) @ (self.weight.float() * self.scale.t()).t()
        return (product + self.bias.float()).to(self.bias.dtype)


def quantize_blocks(blocks: nn.ModuleList) -> None:
    """Replace every linear layer of the transformer blocks but the modulation's, which stays exact."""
    for block in blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear) and "_mod." not in name:
                path, _, leaf = name.rpartition(".")
                setattr(block.get_submodule(path), leaf, Fp8Linear(module))
