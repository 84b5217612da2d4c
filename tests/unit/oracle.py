"""diffusers as the oracle, and small helpers to build rows and requests for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

from ditpack.request import ImageRequest


def reference_transformer(checkpoint: Path) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(checkpoint / "transformer", dtype=torch.float32).eval()


def reference_pipeline(checkpoint: Path) -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.inference_mode()
def reference_forward(
    model: QwenImageTransformer2DModel, image: torch.Tensor, text: torch.Tensor, sigma: float, grids: Any
) -> torch.Tensor:
    """One row alone through diffusers: image [S, C], text [L, D], the row's patch grids → [S, C]."""
    return model(
        hidden_states=image[None],
        encoder_hidden_states=text[None],
        timestep=torch.tensor([sigma]),
        img_shapes=[[(1, height, width) for height, width in grids]],
        return_dict=False,
    )[0][0]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute value of the oracle."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def request(**changes: Any) -> ImageRequest:
    """A small resolved request; keyword arguments change its fields."""
    fields: dict[str, Any] = {
        "prompt": "a red apple",
        "negative_prompt": " ",
        "width": 64,
        "height": 64,
        "num_inference_steps": 4,
        "true_cfg_scale": 4.0,
        "seed": 7,
        "output_format": "png",
        "response_format": "bytes",
        "deadline_ms": None,
        "priority": 2,
        "accepted_ns": 0,
    }
    fields.update(changes)
    if fields["true_cfg_scale"] == 1:
        fields["negative_prompt"] = None
    return ImageRequest(**fields)
