"""What a checkpoint that edits images says of them: how many, how large, how the prompt names them. Needs no torch.

Sizes are those of ``calculate_dimensions`` in diffusers' ``QwenImageEditPipeline`` and ``QwenImageEditPlusPipeline``,
and of ``smart_resize`` in transformers' ``Qwen2VLImageProcessor``, rounding included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ditpack.models.config_rules import Config

_PLUS = "QwenImageEditPlusPipeline"
EDITING_FAMILIES = ("QwenImageEditPipeline", _PLUS)
_ROUNDING = 32  # both pipelines round the sides of what they resize to multiples of it
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]

Size = tuple[int, int]  # (width, height) in pixels


@dataclass(frozen=True, slots=True)
class Vision:
    """The numbers of the vision tower's inputs: side of a patch in pixels, patches to a token along each side."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def size(self, size: Size) -> Size:
        """The size, in whole tokens and within the pixel bounds, that an image of ``size`` is shown at."""
        width, height = size
        token = self.patch_size * self.merge_size
        rounded = [round(side / token) * token for side in size]
        if math.prod(rounded) > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rounded = [max(token, math.floor(side / shrink / token) * token) for side in size]
        elif math.prod(rounded) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rounded = [math.ceil(side * grow / token) * token for side in size]
        return rounded[0], rounded[1]

    def grid(self, size: Size) -> Size:
        """Tokens (width, height) of an image shown at ``size``."""
        token = self.patch_size * self.merge_size
        return size[0] // token, size[1] // token


@dataclass(frozen=True, slots=True)
class Editing:
    """How one checkpoint edits.

    ``numbered``: the prompt calls its images "Picture 1", "Picture 2", …. An image is scaled to the area of the square
    with ``condition_side`` before the vision tower sees it, and to that with ``reference_side`` for the VAE.
    """

    max_references: int
    numbered: bool
    condition_side: int
    reference_side: int
    vision: Vision

    def sizes(self, size: Size) -> tuple[Size, Size, Size] | None:
        """The sizes to resize an image of ``size`` to: for the VAE, and first and then for the vision tower.

        None when the image is so narrow that one of them has no pixels.
        """
        ratio = size[0] / size[1]
        reference, condition = scaled(self.reference_side, ratio), scaled(self.condition_side, ratio)
        if 0 in (*reference, *condition):
            return None
        return reference, condition, self.vision.size(condition)


def scaled(side: int, ratio: float) -> Size:
    """The size of aspect ``ratio`` (width / height) and area ``side``², each side rounded to a multiple of 32."""
    width = math.sqrt(side * side * ratio)
    return round(width / _ROUNDING) * _ROUNDING, round(width / ratio / _ROUNDING) * _ROUNDING


def read_editing(
    path: Path, family: str, text_encoder: Config, condition_side: int | None, reference_side: int
) -> Editing | None:
    """How the checkpoint at ``path`` edits, or None when pipelines of its ``family`` do not.

    Raises:
        CheckpointError: the vision tower or its image processor is not described, or not as this code knows them.
    """
    if family not in EDITING_FAMILIES:
        return None
    plus = family == _PLUS
    return Editing(
        max_references=3 if plus else 1,
        numbered=plus,
        condition_side=condition_side or (384 if plus else reference_side),
        reference_side=reference_side,
        vision=_read_vision(path / "processor", text_encoder),
    )


def _read_vision(directory: Path, text_encoder: Config) -> Vision:
    nested = text_encoder["vision_config"]
    if not isinstance(nested, dict):
        raise text_encoder.error("vision_config", "must be a json object")
    tower = Config(text_encoder.file, {"spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": 14} | nested)
    text_encoder.count("image_token_id")
    processor = _read_processor(directory)
    for ours, theirs in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "spatial_merge_size"),
    ):
        processor.one_of(ours, (tower.count(theirs),), default=tower[theirs])
    size = processor.get("size") or {}
    bounds = Config(
        processor.file,
        {
            "min_pixels": processor.get("min_pixels") or size.get("shortest_edge", 56 * 56),
            "max_pixels": processor.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
            "image_mean": processor.get("image_mean", _CLIP_MEAN),
            "image_std": processor.get("image_std", _CLIP_STD),
        },
    )
    mean, std = (bounds.numbers(key, 3) for key in ("image_mean", "image_std"))
    return Vision(
        patch_size=tower["patch_size"],
        temporal_patch_size=tower["temporal_patch_size"],
        merge_size=tower["spatial_merge_size"],
        min_pixels=bounds.count("min_pixels"),
        max_pixels=bounds.count("max_pixels"),
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
    )


def _read_processor(directory: Path) -> Config:
    """The image processor's settings, which newer releases of transformers keep inside the processor's."""
    file = directory / "preprocessor_config.json"
    if file.is_file() or not (directory / "processor_config.json").is_file():
        return Config.read(file)
    whole = Config.read(directory / "processor_config.json")
    inner = whole["image_processor"]
    if not isinstance(inner, dict):
        raise whole.error("image_processor", "must be a json object")
    return Config(whole.file, inner)
