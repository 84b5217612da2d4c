"""True classifier-free guidance over packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def true_cfg(positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """Combine the two branches and rescale each token to the norm of its conditional prediction.

    Source: ``QwenImagePipeline.__call__``. A token that combines to 0 stays 0 (the reference divides 0 by 0).

    Args:
        positive, negative: [S, C], the conditional and unconditional velocity of the same tokens.
        scale: [S, 1], each token's true_cfg_scale.
    """
    combined = negative + scale * (positive - negative)
    norm = torch.linalg.vector_norm(combined, dim=-1, keepdim=True)
    target = torch.linalg.vector_norm(positive, dim=-1, keepdim=True)
    return combined * (target / torch.where(norm == 0, torch.ones_like(norm), norm))
