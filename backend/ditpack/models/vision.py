"""Qwen2.5-VL's vision tower: images to the features that stand in for their tokens in a prompt."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import Checkpoint
from ditpack.models.editing import Size, Vision
from ditpack.models.weights import LoadReport, load_component

log = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]


class VisionTower:
    """Encodes images one by one, so that an image's features do not depend on what it came with."""

    def __init__(self, model: Any, settings: Vision, report: LoadReport) -> None:
        self._model = model
        self._settings = settings
        self._mean, self._std = (torch.tensor(values, device=report.device) for values in (settings.mean, settings.std))
        self.report = report

    @torch.inference_mode()
    def encode(self, pixels: Pixels) -> Tensor:
        """uint8 [H, W, 3], both sides whole tokens, as ``Vision.size`` makes them → [tokens, text width] on the device.

        Raises:
            InvalidRequest: a side is no whole number of tokens.
        """
        height, width = pixels.shape[:2]
        token = self._settings.patch_size * self._settings.merge_size
        if not height or not width or height % token or width % token:
            raise InvalidRequest("SIZES", [height, width], f"must be positive multiples of {token}")
        image = torch.from_numpy(pixels).to(self.report.device).float() / 255
        patches = patchify((image - self._mean) / self._std, self._settings).to(self.report.dtype)
        side = self._settings.patch_size
        grid = torch.tensor([[1, height // side, width // side]], device=self.report.device)
        features: Tensor = self._model(patches, grid_thw=grid).pooler_output
        return features

    def grid(self, pixels: Pixels) -> Size:
        """Tokens (width, height) of an image."""
        return self._settings.grid((pixels.shape[1], pixels.shape[0]))


def patchify(image: Tensor, settings: Vision) -> Tensor:
    """[H, W, 3] → [patches, 3 · temporal_patch_size · patch_size²], the patches of each token together.

    Source: transformers ``Qwen2VLImageProcessor``; a still image fills every frame of a patch.
    """
    side, merge = settings.patch_size, settings.merge_size
    height, width, channels = image.shape
    tokens = image.reshape(height // (merge * side), merge, side, width // (merge * side), merge, side, channels)
    patches = tokens.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
    return patches.expand(-1, -1, -1, -1, -1, settings.temporal_patch_size, -1, -1).reshape(
        -1, channels * settings.temporal_patch_size * side * side
    )


def image_runs(input_ids: Sequence[int], image_token: int) -> list[slice]:
    """Where the tokens of each image are: images never touch, their start and end tokens keep them apart."""
    runs, start = [], 0
    for is_image, group in groupby(input_ids, key=lambda token: token == image_token):
        length = sum(1 for _ in group)
        if is_image:
            runs.append(slice(start, start + length))
        start += length
    return runs


def multimodal_positions(length: int, runs: Sequence[slice], grids: Iterable[Size]) -> Tensor:
    """int64 [3, length]: each token's temporal, height and width position.

    Text goes on by one on all three axes; an image's tokens have its start plus their row and column, and the text
    behind it goes on after the longer side. Source: transformers ``Qwen2_5_VLModel.get_rope_index``.
    """
    positions = torch.empty(3, length, dtype=torch.int64)
    done, position = 0, 0
    for run, (width, height) in zip(runs, grids, strict=True):
        positions[:, done : run.start] = torch.arange(position, position + run.start - done)
        position += run.start - done
        place = torch.arange(height * width)
        positions[:, run] = position + torch.stack((torch.zeros_like(place), place // width, place % width))
        position += max(width, height)
        done = run.stop
    positions[:, done:] = torch.arange(position, position + length - done)
    return positions


def load_vision_tower(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> VisionTower | None:
    """Load the vision tower of ``checkpoint``; None for one that does not edit images.

    Raises:
        CheckpointError: weights that do not fit the config.
    """
    if checkpoint.editing is None:
        return None
    directory = checkpoint.path / "text_encoder"
    config = Qwen2_5_VLConfig.from_pretrained(directory, local_files_only=True).vision_config
    with torch.device("meta"):
        model = Qwen2_5_VisionTransformerPretrainedModel._from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.rotary_pos_emb = type(model.rotary_pos_emb)(config).to(device)  # no file holds its frequencies
    report = load_component(checkpoint, "text_encoder", model.eval(), device, dtype, rename=_visual)
    log.info("vision tower: %s", report)
    return VisionTower(model, checkpoint.editing.vision, report)


def _visual(key: str) -> str | None:
    _, found, name = key.partition("visual.")
    return name if found else None
