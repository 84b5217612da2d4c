"""The pointwise passes of a layer whose updates are normed on their way in and on their way out.

The functions here are the definition, in plain torch; on CUDA they hand over to the kernels of
``models.sandwich_kernels``, each one trip through memory, which the GPU tests hold against them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ditpack.models import kernels, sandwich_kernels
from ditpack.models.rotary import Rotary, apply_rotary


class Stream:
    """A residual stream [n, D] and the gated update that is still to be added to it.

    Adding it and norming for the next sub-layer are one pass over memory, so an update waits for its next reader.
    ``rows`` [n] tells each token's row. The stream is changed in place.
    """

    def __init__(self, x: Tensor, rows: Tensor) -> None:
        self._x = x
        self._rows = rows
        self._waiting: tuple[Tensor, nn.RMSNorm, Tensor | None] | None = None

    def add(self, update: Tensor, norm: nn.RMSNorm, gate: Tensor | None) -> None:
        """x += tanh(gate) · norm(update), with one gate [R, D] a row or none."""
        assert self._waiting is None, "norm comes between two updates"
        self._waiting = (update, norm, gate)

    def norm(self, norm: nn.RMSNorm, scale: Tensor | None) -> Tensor:
        """norm(x) · (1 + scale), with one scale [R, D] a row or none."""
        if scale is not None and kernels.usable(self._x):
            normed = sandwich_kernels.add_norm(self._x, self._waiting, norm, scale, self._rows)
        else:
            self._settle()
            normed = norm(self._x) if scale is None else norm(self._x) * (1 + scale)[self._rows]
        self._waiting = None
        return normed

    def end(self) -> Tensor:
        """x, with every update in it."""
        self._settle()
        return self._x

    def _settle(self) -> None:
        if self._waiting is not None:
            update, norm, gate = self._waiting
            self._x += norm(update) if gate is None else gate.tanh()[self._rows] * norm(update)
            self._waiting = None


def norm_rotate(x: Tensor, norm: nn.RMSNorm, rotary: Rotary) -> Tensor:
    """Norm each head of ``x`` [n, heads, head_dim] and rotate it; may write into ``x``."""
    if kernels.usable(x):
        return sandwich_kernels.norm_rotate(x, norm, rotary)
    return apply_rotary(norm(x), rotary)


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) · x; may write into ``gate``."""
    if kernels.usable(x):
        return sandwich_kernels.silu_mul(gate, x)
    return F.silu(gate).mul_(x)
