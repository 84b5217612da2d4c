"""Whole edits against diffusers' edit pipelines: same seed, images, guidance and steps, fp32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from edit_tools import Stages, picture, reference_edit
from oracle import relative_error
from PIL import Image

WIDE, TALL, SQUARE = (150, 70), (60, 200), (97, 101)
CASES: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]]]] = {
    "edit, its own size": ("tiny_edit", {}, [WIDE]),
    "edit, sizes given": ("tiny_edit", {"WIDTH": 48, "HEIGHT": 80, "NEGATIVE_PROMPT": "blurry"}, [TALL]),
    "plus, one": ("tiny_edit_2509", {}, [TALL]),
    "plus, two": ("tiny_edit_2509", {"TRUE_CFG_SCALE": 1.0}, [TALL, WIDE]),
    "plus, three": ("tiny_edit_2509", {"NEGATIVE_PROMPT": "dark, blurry"}, [WIDE, SQUARE, TALL]),
    "2511, one": ("tiny_edit_2511", {"HEIGHT": 96}, [SQUARE]),
    "2511, three": ("tiny_edit_2511", {}, [TALL, SQUARE, WIDE]),
}


@pytest.fixture(scope="module")
def stages(
    tiny_edit_checkpoint: Path, tiny_edit_2509_checkpoint: Path, tiny_edit_2511_checkpoint: Path
) -> dict[str, Stages]:
    paths = {
        "tiny_edit": tiny_edit_checkpoint,
        "tiny_edit_2509": tiny_edit_2509_checkpoint,
        "tiny_edit_2511": tiny_edit_2511_checkpoint,
    }
    return {name: Stages(path) for name, path in paths.items()}


def case(name: str) -> tuple[str, dict[str, Any], list[Image.Image]]:
    checkpoint, values, sizes = CASES[name]
    images = [picture(*size, seed) for seed, size in enumerate(sizes)]
    return checkpoint, {"PROMPT": "make it snow", "SEED": 3, "NUM_INFERENCE_STEPS": 4, **values}, images


@pytest.mark.parametrize("name", CASES)
def test_whole_edits_equal_the_pipeline(name: str, stages: dict[str, Stages]) -> None:
    checkpoint, values, images = case(name)
    ours = stages[checkpoint]
    with torch.no_grad():
        (latents,) = ours.denoise([ours.begin(values, images)])
    assert relative_error(latents, reference_edit(ours.checkpoint.path, values, images)) < 1e-4


def test_the_embedded_checkpoints_edits_equal_the_pipeline(embedded_checkpoint: Path) -> None:
    ours = Stages(embedded_checkpoint)
    values = {"PROMPT": "combine both pictures", "SEED": 3, "NUM_INFERENCE_STEPS": 2}
    images = [picture(*TALL), picture(*WIDE, 1)]
    with torch.no_grad():
        (latents,) = ours.denoise([ours.begin(values, images)])
    assert relative_error(latents, reference_edit(embedded_checkpoint, values, images)) < 1e-4
