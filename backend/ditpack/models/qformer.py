"""The Q-Former that turns the visual tokens of an answer, however many, into a fixed number of queries.

Source: bytedance/mammothmoda ``SimpleQFormerImageRefiner``; parameter names are its own. It runs once a request, row by
row, so no mask exists: a row's queries see that row's inputs and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ditpack.models.mammoth_config import RefinerConfig, round_up
from ditpack.models.sandwich import silu_mul


class QFormer(nn.Module):
    """``num_queries`` learnt queries that attend to themselves and to the inputs. ``width`` is that of its output."""

    def __init__(self, config: RefinerConfig, input_width: int, width: int) -> None:
        super().__init__()
        heads = valid_heads(width, config.num_heads or max(1, width // 128))
        eps = config.norm_eps
        self.input_proj = nn.Sequential(nn.RMSNorm(input_width, eps=eps), nn.Linear(input_width, width))
        self.query = nn.Parameter(torch.empty(1, config.num_queries, width))
        self.layers = nn.ModuleList(QFormerLayer(width, heads, eps) for _ in range(config.num_layers))

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs of one row, [n, input_width] with n at least 1 → [num_queries, width]."""
        keys = self.input_proj(inputs)
        queries = self.query[0]
        for layer in self.layers:
            queries = layer(queries, keys)
        return queries


class QFormerLayer(nn.Module):
    """Attention among the queries, attention to the inputs, a gated feed-forward; each normed before, added after."""

    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.ln_q1, self.ln_q2, self.ln_ffn = (nn.RMSNorm(width, eps=eps) for _ in range(3))
        self.self_attn, self.cross_attn = (nn.MultiheadAttention(width, heads) for _ in range(2))
        self.ffn = SwiGLU(width, round_up(4 * width, 256))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[num_queries, width] and [n, width] → [num_queries, width]."""
        normed = self.ln_q1(queries)
        queries = queries + self.self_attn(normed, normed, normed, need_weights=False)[0]
        queries = queries + self.cross_attn(self.ln_q2(queries), keys, keys, need_weights=False)[0]
        return queries + self.ffn(self.ln_ffn(queries))


class SwiGLU(nn.Module):
    """linear_2(silu(linear_1(x)) · linear_3(x)), without biases."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.linear_1, self.linear_3 = (nn.Linear(dim, inner_dim, bias=False) for _ in range(2))
        self.linear_2 = nn.Linear(inner_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(silu_mul(self.linear_1(x), self.linear_3(x)))


def valid_heads(width: int, proposed: int) -> int:
    """``proposed`` if it divides ``width``, else the divisor that makes heads nearest to 128; of two, the larger."""
    if width % proposed == 0:
        return proposed
    target = max(1, round(width / 128))
    divisors = [heads for heads in range(1, min(128, width) + 1) if width % heads == 0]
    return min(divisors, key=lambda heads: (abs(heads - target), -heads))
