"""How large the model is, what it is trained on, and how its minutes are spent."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ditpack.demo_model.scenes import Size

# (size, how many pictures are sent, size of those pictures) → how often it is drawn. No pictures: text to image.
Shape = tuple[Size, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """``shares`` of the minutes: judge, VAE, transformer. Pools count scenes, ``*_batch`` pictures of 128 x 128."""

    # Transformer
    layers: int
    heads: int
    head_dim: int
    axes: tuple[int, int, int]
    # Text encoder: width, layers, heads, key-value heads, MLP width, most tokens
    text: tuple[int, int, int, int, int, int]
    # Vision tower: width, layers, heads, MLP width
    vision: tuple[int, int, int, int]
    # VAE: base width, multipliers, residual blocks a level
    vae: tuple[int, tuple[int, ...], int]
    judge_width: int
    sprite_side: int
    text_shapes: Mapping[Size, float]
    edit_shapes: Mapping[Shape, float]
    edit_share: float  # of the steps
    default_side: int
    reference_side: int
    condition_side: int
    shares: tuple[float, float, float]
    judge_batch: int
    vae_batch: int
    dit_batch: int
    pool: int
    refill: int  # scenes renewed at a time
    refill_every: int  # steps


REAL = Preset(
    layers=6,
    heads=4,
    head_dim=64,
    axes=(8, 28, 28),
    text=(192, 2, 3, 1, 512, 4096),
    vision=(64, 2, 2, 128),
    vae=(24, (1, 2, 3, 3), 1),
    judge_width=48,
    sprite_side=256,
    text_shapes={
        (128, 128): 6, (160, 96): 2, (96, 160): 2, (144, 112): 1.5, (112, 144): 1.5, (192, 64): 1, (64, 192): 1,
        (96, 96): 1, (96, 64): 0.5, (64, 96): 0.5, (64, 64): 0.5, (192, 128): 0.7, (128, 192): 0.7, (192, 192): 0.4,
        (256, 256): 0.25,
    },
    edit_shapes={
        ((128, 128), 1): 6, ((160, 96), 1): 2, ((96, 160), 1): 2, ((160, 128), 1): 1, ((128, 160), 1): 1,
        ((192, 96), 1): 0.7, ((96, 192), 1): 0.7, ((128, 128), 2): 2, ((160, 96), 2): 0.7, ((96, 160), 2): 0.7,
        ((128, 128), 3): 0.5, ((160, 96), 3): 0.5,
    },
    edit_share=0.35,
    default_side=128,
    reference_side=128,
    condition_side=96,
    shares=(0.06, 0.20, 0.74),
    judge_batch=512,
    vae_batch=128,
    dit_batch=2048,
    pool=120_000,
    refill=512,
    refill_every=100,
)  # fmt: skip

# Everything there is, as small as it goes: for the tests, and to see on a laptop whether it runs.
SMOKE = Preset(
    layers=2,
    heads=2,
    head_dim=16,
    axes=(4, 6, 6),
    text=(32, 1, 2, 1, 64, 896),
    vision=(16, 1, 1, 16),
    vae=(8, (1, 1, 1, 1), 1),
    judge_width=8,
    sprite_side=64,
    text_shapes={(64, 64): 2, (96, 64): 1},
    edit_shapes={((64, 64), 1): 2, ((64, 64), 2): 1},
    edit_share=0.4,
    default_side=64,
    reference_side=64,
    condition_side=64,
    shares=(0.2, 0.4, 0.4),
    judge_batch=16,
    vae_batch=4,
    dit_batch=16,
    pool=64,
    refill=8,
    refill_every=20,
)


class PresetName(enum.StrEnum):
    """The keys of ``PRESETS``."""

    REAL = "real"
    SMOKE = "smoke"


PRESETS = {PresetName.REAL: REAL, PresetName.SMOKE: SMOKE}
