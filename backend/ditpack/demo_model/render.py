"""Scenes to pixels, a batch at a time, on the device that holds the sprites and without reading it back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ditpack.demo_model.icons import Sprites
from ditpack.demo_model.scenes import COLOURS, Item, Scene, Size


@dataclass(frozen=True, slots=True)
class Group:
    """Items of any scenes of a batch that are drawn from the same mip."""

    mip: int
    scenes: Tensor  # int64 [m]: the scene of each item
    icons: Tensor  # int64 [m]
    boxes: Tensor  # fp32 [m, 3]: centre x, centre y, side, in pixels

    def to(self, device: torch.device) -> Group:
        return Group(self.mip, *(part.to(device, non_blocking=True) for part in (self.scenes, self.icons, self.boxes)))


@dataclass(frozen=True, slots=True)
class SceneBatch:
    """N scenes of one size as tensors."""

    size: Size
    groups: tuple[Group, ...]
    backgrounds: Tensor  # fp32 [N, 3], 0 … 1

    def to(self, device: torch.device) -> SceneBatch:
        groups = tuple(group.to(device) for group in self.groups)
        return replace(self, groups=groups, backgrounds=self.backgrounds.to(device, non_blocking=True))


def batch(scenes: Sequence[Scene], sprite_side: int) -> SceneBatch:
    """``scenes``, all of one size, on the CPU, to be drawn from sprites of ``sprite_side``."""
    by_mip: dict[int, list[tuple[int, Item]]] = {}
    for row, scene in enumerate(scenes):
        for item in scene.items():
            mip = max(0, round(math.log2(sprite_side / item.side)))
            by_mip.setdefault(mip, []).append((row, item))
    groups = tuple(
        Group(
            mip,
            torch.tensor([row for row, _ in items]),
            torch.tensor([item.icon for _, item in items]),
            torch.tensor([(item.x, item.y, item.side) for _, item in items]),
        )
        for mip, items in sorted(by_mip.items())
    )
    backgrounds = torch.tensor([COLOURS[scene.background] for scene in scenes]) / 255
    return SceneBatch(scenes[0].size, groups, backgrounds)


def render(sprites: Sprites, scenes: SceneBatch) -> Tensor:
    """fp32 [N, 3, height, width] in -1 … 1. The icons of one scene must not overlap."""
    width, height = scenes.size
    device = sprites.mips[0].device
    x = torch.arange(width, device=device) + 0.5
    y = torch.arange(height, device=device) + 0.5
    drawn = torch.zeros(len(scenes.backgrounds), 4, height, width, device=device)
    for group in scenes.groups:
        mip = sprites.mips[min(group.mip, len(sprites.mips) - 1)]
        centre_x, centre_y, side = group.boxes[:, :, None].unbind(1)
        u = (x - centre_x) / (side / 2)  # [m, width], -1 … 1 inside of the sprite
        v = (y - centre_y) / (side / 2)
        grid = torch.stack((u[:, None, :].expand(-1, height, -1), v[:, :, None].expand(-1, -1, width)), dim=-1)
        items = F.grid_sample(mip[group.icons].float(), grid, mode="bilinear", align_corners=False)
        drawn.index_add_(0, group.scenes, items)
    drawn = drawn / 255
    picture = scenes.backgrounds[:, :, None, None] * (1 - drawn[:, 3:]) + drawn[:, :3]
    return picture.clamp(0, 1) * 2 - 1


def to_bytes(pictures: Tensor) -> Tensor:
    """[N, 3, height, width] in -1 … 1 → uint8 [N, height, width, 3]."""
    return ((pictures.permute(0, 2, 3, 1) + 1) * 127.5).clamp(0, 255).round().to(torch.uint8)


def draw(sprites: Sprites, scene: Scene) -> npt.NDArray[np.uint8]:
    """The true picture of one scene, uint8 [height, width, 3]."""
    scenes = batch([scene], sprites.side).to(sprites.mips[0].device)
    return to_bytes(render(sprites, scenes))[0].cpu().numpy()
