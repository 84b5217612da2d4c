"""Training the judge: scenes as they are drawn, blurred and noisy at times, as generated pictures are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ditpack.demo_model.icons import Sprites
from ditpack.demo_model.judge.network import Judge
from ditpack.demo_model.render import batch, render, to_bytes
from ditpack.demo_model.scenes import Random, Scene, SceneMaker, Size
from ditpack.demo_model.train.optimiser import Optimiser

# Whole pictures, and halves and thirds of pictures, whose icons are judged one by one.
SIZES: tuple[Size, ...] = (
    *((128, 128), (128, 128), (160, 96), (96, 160), (192, 64), (64, 192), (96, 96), (64, 64)),
    *((64, 128), (128, 64), (80, 96), (96, 80), (48, 96)),
)


class JudgeStage:
    """A stage of ``train.loop``."""

    name = "judge"

    def __init__(self, judge: Judge, scenes: SceneMaker, sprites: Sprites, batch_size: int, seed: int = 1) -> None:
        self.judge, self._scenes, self._sprites = judge, scenes, sprites
        self._batch_size = batch_size
        self._random = np.random.default_rng(seed)
        self._optimiser = Optimiser(judge.named_parameters(), 3e-3, weight_decay=1e-2, average=0.998)
        self._device = sprites.mips[0].device
        self._loss = torch.zeros((), device=self._device)
        self._right = torch.zeros((), device=self._device)

    def step(self, progress: float) -> None:
        size = SIZES[self._random.integers(len(SIZES))]
        scenes = [self._scenes.draw(self._random, size) for _ in range(self._batch_size)]
        names, counts, styles = (part.to(self._device, non_blocking=True) for part in self._truth(scenes))
        pictures = render(self._sprites, batch(scenes, self._sprites.side).to(self._device))
        with torch.autocast(self._device.type, torch.bfloat16):
            seen = self.judge(worsen(pictures, self._random))
        name, count, style = (logits.float() for logits in seen)
        loss = (
            F.cross_entropy(name, names) + 0.5 * F.cross_entropy(count, counts) + 0.5 * F.cross_entropy(style, styles)
        )
        self._optimiser.step(loss, progress)
        self._loss = loss.detach()
        self._right = names.gather(1, name.argmax(1, keepdim=True)).gt(0).float().mean()

    def figures(self) -> dict[str, float]:
        return {"loss": float(self._loss), "name": float(self._right)}

    @torch.inference_mode()
    def accuracy(self, batches: int, seed: int = 2) -> dict[str, float]:
        """How right the judge is about held-out scenes: shares of names (any of a scene's; also among its first five),
        counts and styles."""
        random = np.random.default_rng(seed)
        right = {"name": 0.0, "name_top5": 0.0, "count": 0.0, "style": 0.0}
        for index in range(batches):
            size = SIZES[index % len(SIZES)]
            scenes = [self._scenes.draw(random, size, held_out=True) for _ in range(self._batch_size)]
            names, counts, styles = (part.to(self._device) for part in self._truth(scenes))
            pictures = render(self._sprites, batch(scenes, self._sprites.side).to(self._device))
            name, count, style = self.judge(pictures)
            found = names.gather(1, name.topk(min(5, name.shape[1]), dim=1).indices) > 0
            for key, hits in (
                ("name", found[:, 0]),
                ("name_top5", found.any(1)),
                ("count", count.argmax(1) == counts),
                ("style", style.argmax(1) == styles),
            ):
                right[key] += float(hits.float().mean()) / batches
        return {key: round(value, 4) for key, value in right.items()}

    def sheet(self, file: Path) -> None:
        """Some of what it learns from."""
        scenes = [self._scenes.draw(self._random, (128, 128)) for _ in range(16)]
        pictures = render(self._sprites, batch(scenes, self._sprites.side).to(self._device))
        tiles = list(to_bytes(worsen(pictures, self._random)).cpu().numpy())
        Image.fromarray(np.vstack([np.hstack(tiles[:8]), np.hstack(tiles[8:])])).save(file)

    def finish(self) -> None:
        self._optimiser.settle()

    def state(self, done: bool) -> dict[str, Any]:
        return {"judge": self.judge.state_dict(), "optimiser": None if done else self._optimiser.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.judge.load_state_dict(state["judge"])
        if state["optimiser"]:
            self._optimiser.load(state["optimiser"])
            self._random = np.random.default_rng(self._optimiser.steps)

    def _truth(self, scenes: list[Scene]) -> tuple[Tensor, Tensor, Tensor]:
        """Names as probabilities [N, names], counts from 0 and styles [N]."""
        index = {name: place for place, name in enumerate(self.judge.names)}
        names = torch.zeros(len(scenes), len(self.judge.names))
        for row, scene in enumerate(scenes):
            for icon in scene.icons:
                names[row, index[self._scenes.icons[icon].name]] += 1 / scene.count
        counts = torch.tensor([scene.count - 1 for scene in scenes])
        styles = torch.tensor([self.judge.styles.index(self._scenes.style(scene)) for scene in scenes])
        return names, counts, styles


def worsen(pictures: Tensor, random: Random) -> Tensor:
    """Blur all of a batch by one random amount, shift colours a little, and add some noise."""
    height, width = pictures.shape[-2:]
    factor = float(random.choice([1.0, 1.0, 0.7, 0.5]))
    if factor < 1:
        small = (max(16, int(height * factor)), max(16, int(width * factor)))
        pictures = F.interpolate(pictures, small, mode="bilinear", antialias=True)
        pictures = F.interpolate(pictures, (height, width), mode="bilinear")
    shift = 0.05 * torch.randn(len(pictures), 3, 1, 1, device=pictures.device)
    return pictures + shift + float(random.uniform(0, 0.08)) * torch.randn_like(pictures)
