"""The pointwise passes of a layer whose updates are normed on the way in and on the way out."""

from __future__ import annotations

from torch import Tensor, nn


def norm_scaled(x: Tensor, norm: nn.RMSNorm, scale: Tensor | None, rows: Tensor) -> Tensor:
    """norm(x) · (1 + scale), with one scale [R, D] a row or none; ``rows`` [n] tells each token's row."""
    return norm(x) if scale is None else norm(x) * (1 + scale)[rows]


def add_normed(x: Tensor, update: Tensor, norm: nn.RMSNorm, gate: Tensor | None, rows: Tensor) -> Tensor:
    """x + tanh(gate) · norm(update), with one gate [R, D] a row or none."""
    return x + (norm(update) if gate is None else gate.tanh()[rows] * norm(update))
