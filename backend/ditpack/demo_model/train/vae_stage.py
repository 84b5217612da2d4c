"""Training the VAE on scenes, by the clock."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ditpack.demo_model.icons import Sprites
from ditpack.demo_model.render import SceneBatch, batch, render, to_bytes
from ditpack.demo_model.scenes import SceneMaker, Size
from ditpack.demo_model.train.optimiser import Optimiser
from ditpack.demo_model.train.still_vae import StillVae

_PREPARED = 192  # batches of layouts; the icons in them are drawn anew every time
_KL = 1e-5
_HIDDEN = re.compile(r"\.(down_blocks|mid_block|up_blocks)\..*weight$")


class VaeStage:
    """A stage of ``train.loop``. ``batch_size`` counts pictures of 128 x 128; smaller ones come in larger batches."""

    name = "vae"

    def __init__(self, vae: Any, scenes: SceneMaker, sprites: Sprites, sizes: Sequence[Size], batch_size: int) -> None:
        self.still = StillVae(vae).to(sprites.mips[0].device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._scenes, self._sprites = scenes, sprites
        self._device = sprites.mips[0].device
        self._random = np.random.default_rng(3)
        self._optimiser = Optimiser(
            self.still.named_parameters(), 1e-3, average=0.999, hidden=_HIDDEN, hidden_rate=3e-3
        )
        self._prepared = self._prepare(sizes, batch_size)
        self._last = torch.zeros((), device=self._device)

    def step(self, progress: float) -> None:
        scenes = self._prepared[self._random.integers(len(self._prepared))]
        icons = len(self._sprites.mips[0])
        groups = tuple(
            replace(group, icons=torch.randint(icons, group.icons.shape, device=self._device))
            for group in scenes.groups
        )
        pictures = render(self._sprites, replace(scenes, groups=groups))
        with torch.autocast(self._device.type, torch.bfloat16):
            loss, error = self._loss(pictures)
        self._optimiser.step(loss, progress)
        self._last = error

    def _loss(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the mean squared error for people."""
        mean, log_variance = self.still.encode(pictures)
        mean, log_variance = mean.float(), log_variance.float()
        latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        error = self.still.decode(latents).float() - pictures
        squared = error.square().mean()
        across = error[..., 1:] - error[..., :-1]
        down = error[..., 1:, :] - error[..., :-1, :]
        coarse = F.avg_pool2d(error, 4).abs().mean()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        # The absolute error keeps flat areas clean, the squared one is what PSNR counts, the gradients hold the edges.
        loss = error.abs().mean() + 10 * squared + 0.5 * (across.abs().mean() + down.abs().mean()) + 0.5 * coarse
        return loss + _KL * kl, squared.detach()

    def figures(self) -> dict[str, float]:
        """PSNR of the last batch, with noisy latents: a little below that of use."""
        return {"psnr": 10 * math.log10(4 / max(1e-9, float(self._last)))}

    @torch.inference_mode()
    def quality(self, sizes: Sequence[Size], count: int) -> float:
        """Mean PSNR in dB of held-out scenes, ``count`` of each size."""
        random = np.random.default_rng(4)
        total = 0.0
        for size in sizes:
            scenes = [self._scenes.draw(random, size, held_out=True) for _ in range(count)]
            pictures = render(self._sprites, batch(scenes, self._sprites.side).to(self._device))
            decoded = torch.cat([self.still.decode(self.still.encode(part)[0]) for part in pictures.split(32)])
            squared = (to_bytes(decoded).float() - to_bytes(pictures).float()).square().mean((1, 2, 3))
            total += float((10 * torch.log10(255**2 / squared.clamp(min=1e-3))).mean())
        return round(total / len(sizes), 2)

    @torch.inference_mode()
    def statistics(self, sizes: Sequence[Size], count: int) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each latent channel, over ``count`` scenes of each size."""
        random = np.random.default_rng(5)
        latents = []
        for size in sizes:
            scenes = [self._scenes.draw(random, size) for _ in range(count)]
            pictures = render(self._sprites, batch(scenes, self._sprites.side).to(self._device))
            for part in pictures.split(32):
                latents.append(self.still.encode(part)[0].transpose(0, 1).flatten(1))
        values = torch.cat(latents, dim=1)
        return [[round(float(x), 5) for x in part.cpu()] for part in (values.mean(1), values.std(1))]  # type: ignore[return-value]

    @torch.inference_mode()
    def sheet(self, file: Path) -> None:
        """Held-out scenes above what becomes of them."""
        random = np.random.default_rng(6)
        scenes = [self._scenes.draw(random, (128, 128), held_out=True) for _ in range(16)]
        pictures = render(self._sprites, batch(scenes, self._sprites.side).to(self._device))
        with self._optimiser.averaged():
            decoded = self.still.decode(self.still.encode(pictures)[0])
        rows = [part for pair in zip(pictures.split(8), decoded.split(8), strict=True) for part in pair]
        tiles = [np.hstack(list(to_bytes(row.float()).cpu().numpy())) for row in rows]
        Image.fromarray(np.vstack(tiles)).save(file)

    @torch.no_grad()
    def finish(self) -> None:
        """From here on the weights are rounded to what is exported: latents are made and read by the same VAE."""
        self._optimiser.settle()
        for weight in self.still.parameters():
            weight.copy_(weight.bfloat16())

    def state(self, done: bool) -> dict[str, Any]:
        weights = self.still.state_dict()
        if done:
            return {"vae": {name: weight.bfloat16() for name, weight in weights.items()}, "optimiser": None}
        return {"vae": weights, "optimiser": self._optimiser.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.still.load_state_dict(state["vae"])
        if state["optimiser"]:
            self._optimiser.load(state["optimiser"])
            self._random = np.random.default_rng(self._optimiser.steps)

    def _prepare(self, sizes: Sequence[Size], batch_size: int) -> list[SceneBatch]:
        prepared = []
        for index in range(min(_PREPARED, 16 * len(sizes))):
            size = sizes[index % len(sizes)]
            count = max(2, batch_size * 128 * 128 // (size[0] * size[1]))
            scenes = [self._scenes.draw(self._random, size) for _ in range(count)]
            prepared.append(batch(scenes, self._sprites.side).to(self._device))
        return prepared
