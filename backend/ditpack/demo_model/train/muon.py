"""Muon for many matrices at once: ``torch.optim.Muon`` takes them one by one, and its launches then cost the host more
than a whole step of a small model costs the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon), for matrices alone.

    ``lr`` is in the units of AdamW's (Liu et al. 2025, arXiv:2502.16982). Equals ``torch.optim.Muon`` with
    ``adjust_lr_fn="match_rms_adamw"``.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": alike} for alike in by_shape.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; matrices without a gradient stay as they are."""
        assert closure is None
        for group in self.param_groups:
            if not (matrices := [matrix for matrix in group["params"] if matrix.grad is not None]):
                continue
            gradients = [matrix.grad for matrix in matrices]
            moments = [self._moment(matrix) for matrix in matrices]
            torch._foreach_lerp_(moments, gradients, 1 - _MOMENTUM)
            looked_ahead = torch._foreach_lerp(gradients, moments, _MOMENTUM)
            updates = orthogonalised(torch.stack(list(looked_ahead)))
            rate = group["lr"] * 0.2 * math.sqrt(max(matrices[0].shape))
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(updates.to(matrices[0].dtype).unbind()), alpha=-rate)

    def _moment(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["moment"] = torch.zeros_like(matrix)
        return state["moment"]  # type: ignore[no-any-return]


def orthogonalised(matrices: Tensor) -> Tensor:
    """About U V^T of each of ``matrices`` [N, rows, columns] = U S V^T, in bf16, by five Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
