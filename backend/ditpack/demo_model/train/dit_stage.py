"""Training transformer, text encoder and vision tower together, by flow matching, on text to image and edits alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbolic_shapes

from ditpack.demo_model.train.batched_dit import dual_block, velocity
from ditpack.demo_model.train.batched_text import encode_pictures, encode_text, text_layer
from ditpack.demo_model.train.optimiser import Optimiser
from ditpack.demo_model.train.pool import Entries, Layouts, Pool

_HIDDEN = re.compile(r"(^|\.)(transformer_blocks|layers|blocks)\.")
_DROPPED = 0.1  # of the texts, for guidance
_TRIALS = 8  # steps that a compiled block is tried on
_RECOMPILES = 64
_REFERENCE_NOISE = 0.03  # so that pictures that were generated before, and are not quite clean, are edited as well


class DitStage:
    """A stage of ``train.loop``. ``paint`` draws the sheet with the averaged weights: it is given the file.

    ``start``: the share of the schedule that it begins at, for weights that were trained before. ``average``: how much
    of the averaged weights stays at each step.
    """

    name = "dit"

    def __init__(
        self,
        dit: Any,
        text_encoder: Any,
        pool: Pool,
        batch_size: int,
        refill: int,
        refill_every: int,
        compile_blocks: bool,
        paint: Callable[[Path], None],
        start: float = 0.0,
        average: float = 0.9995,
    ) -> None:
        self._dit, self._text_encoder, self._pool, self._paint = dit, text_encoder, pool, paint
        self._batch_size, self._refill, self._refill_every = batch_size, refill, refill_every
        self._optimiser = Optimiser(
            [*dit.named_parameters(), *text_encoder.model.named_parameters()],
            1e-3,
            weight_decay=0.01,
            average=average,
            hidden=_HIDDEN,
            hidden_rate=5e-3,
        )
        self._device = next(dit.parameters()).device
        self._run_block: Callable[..., tuple[Tensor, Tensor]] = dual_block
        self._run_layer: Callable[..., tuple[Tensor, Tensor]] = text_layer
        self.problem = self._compile() if compile_blocks else None
        self._start = start
        self._last = torch.zeros((), device=self._device)
        self._seen = 0

    def _compile(self) -> str | None:
        """Compile blocks and layers and try them, there and back, on a few shapes; say why, where that does not work.

        One block for all: the compiler takes the weights of each as inputs, so it has one thing to compile. So with
        the layers of the text encoder.
        """
        torch._dynamo.config.recompile_limit = _RECOMPILES  # type: ignore[attr-defined]
        symbolic_shapes.use_duck_shape = False  # type: ignore[attr-defined]  # two lengths may be equal by accident
        self._run_block = torch.compile(dual_block, dynamic=True)
        self._run_layer = torch.compile(text_layer, dynamic=True)
        try:
            for _ in range(_TRIALS):
                shape, entries = self._pool.draw(self._batch_size)
                layouts = self._pool.layouts[shape]
                with torch.autocast(self._device.type, torch.bfloat16):
                    self._loss(layouts, *self._noised(entries, layouts)).backward()
        except Exception as error:  # a compiler can fail in any way, and none of them may end the training
            self._run_block, self._run_layer = dual_block, text_layer
            return f"{type(error).__name__}: {str(error)[:300]}"
        return None

    def step(self, progress: float) -> None:
        shape, entries = self._pool.draw(self._batch_size)
        layouts = self._pool.layouts[shape]
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = self._loss(layouts, *self._noised(entries, layouts))
        self._optimiser.step(loss, self._start + (1 - self._start) * progress)
        self._last = loss.detach()
        self._seen += len(entries.ids)
        if self._optimiser.steps % self._refill_every == 0:
            self._pool.refill(self._refill)

    def _noised(self, entries: Entries, layouts: Layouts) -> tuple[Tensor, ...]:
        """What is random: image tokens with noise, sigmas, the velocity wanted, texts of which some are dropped."""
        count = len(entries.ids)
        clean = entries.latents.float()
        target, references = clean[:, : layouts.target_tokens], clean[:, layouts.target_tokens :]
        # Mostly in the middle, where it matters; some everywhere.
        sigmas = torch.sigmoid(torch.randn(count, device=self._device) + 0.3)
        uniform = torch.rand(count, device=self._device)
        sigmas = torch.where(torch.rand(count, device=self._device) < 0.1, uniform, sigmas)
        noise = torch.randn_like(target)
        noisy = torch.lerp(target, noise, sigmas[:, None, None])
        image = torch.cat((noisy, references + _REFERENCE_NOISE * torch.randn_like(references)), dim=1)
        dropped = torch.rand(count, device=self._device) < _DROPPED
        ids = torch.where(dropped[:, None], layouts.empty[0], entries.ids)
        lengths = torch.where(dropped, layouts.empty[1], entries.lengths)
        return image, sigmas, noise - target, ids, lengths, entries.pictures

    def _loss(
        self,
        layouts: Layouts,
        image: Tensor,
        sigmas: Tensor,
        wanted: Tensor,
        ids: Tensor,
        lengths: Tensor,
        pictures: Tensor,
    ) -> Tensor:
        model, features = self._text_encoder.model, None
        if layouts.rotary is not None:
            patches = self._pool.features_input(pictures.flatten(0, 1))
            features = (
                encode_pictures(model.visual, patches, *layouts.rotary).unflatten(0, pictures.shape[:2]).flatten(1, 2)
            )
        text = encode_text(model.language_model, ids, layouts.text, features, self._run_layer)
        predicted = velocity(self._dit, image, text, lengths, sigmas, layouts.dit, self._run_block)[
            :, : wanted.shape[1]
        ]
        return (predicted.float() - wanted).square().mean()

    def figures(self) -> dict[str, float]:
        return {"loss": float(self._last), "pictures": float(self._seen)}

    def sheet(self, file: Path) -> None:
        with self._optimiser.averaged():
            self._paint(file)

    def finish(self) -> None:
        self._optimiser.settle()

    def state(self, done: bool) -> dict[str, Any]:
        return {
            "dit": self._dit.state_dict(),
            "text_encoder": self._text_encoder.state_dict(),
            "optimiser": self._optimiser.state(),
            "seen": self._seen,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._dit.load_state_dict(state["dit"])
        self._text_encoder.load_state_dict(state["text_encoder"])
        self._optimiser.load(state["optimiser"])
        self._seen = state["seen"]
