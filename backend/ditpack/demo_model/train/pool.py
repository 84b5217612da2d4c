"""Latents of scenes and of edits with their texts, on the device, by shape; renewed bit by bit while they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ditpack.demo_model.captions import Captions
from ditpack.demo_model.edits import KINDS, EditMaker
from ditpack.demo_model.icons import Sprites
from ditpack.demo_model.render import batch, render, to_bytes
from ditpack.demo_model.scenes import Random, Scene, SceneMaker
from ditpack.demo_model.train.batched_dit import DitLayout, dit_layout
from ditpack.demo_model.train.batched_text import TextLayout, picture_rotary, text_layout
from ditpack.demo_model.train.networks import MERGE, PATCH
from ditpack.demo_model.train.presets import Preset, Shape
from ditpack.demo_model.train.still_vae import StillVae
from ditpack.models.editing import scaled
from ditpack.models.prompt import DROP, EDIT_DROP, EDIT_TEMPLATE, IMAGE_TOKEN, TEMPLATE
from ditpack.models.vision import image_runs

_TEXT_TOKENS = 24  # the most that a caption or an instruction has; longer ones are drawn again
_ALIGNED = 8  # attention with a mask is fastest when a row's tokens are a multiple of it
_ENCODE = 256  # pictures at a time
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the vision tower's processor
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class Layouts:
    """What all entries of a shape share."""

    text: TextLayout
    dit: DitLayout
    target_tokens: int
    rotary: tuple[Tensor, Tensor] | None  # of the vision tower
    empty: tuple[Tensor, int]  # the text of the unconditional branch [L], and its length


@dataclass(slots=True)
class Entries:
    """N entries. All but ``pictures`` as the models take them."""

    latents: Tensor  # [N, S, 4 · z_dim], target first, then references; normalised; bf16 on a GPU
    pictures: Tensor  # uint8 [N, references, H, W, 3], as the vision tower is shown them
    ids: Tensor  # int64 [N, L], behind the dropped prefix
    lengths: Tensor  # int64 [N]

    def parts(self) -> tuple[Tensor, ...]:
        return self.latents, self.pictures, self.ids, self.lengths

    def rows(self, rows: Tensor) -> Entries:
        return Entries(*(part[rows] for part in self.parts()))


class Pool:
    """``mean`` and ``std`` are the latents', per channel."""

    def __init__(
        self,
        preset: Preset,
        scenes: SceneMaker,
        sprites: Sprites,
        still: StillVae,
        statistics: tuple[list[float], list[float]],
        tokenizer: Any,
        text_encoder_config: Any,
        seed: int = 7,
    ) -> None:
        self._preset, self._scenes, self._sprites, self._still = preset, scenes, sprites, still
        self._captions = Captions(scenes.icons)
        self._edits = EditMaker(scenes, self._captions)
        self._device = sprites.mips[0].device
        self._mean, self._std = (torch.tensor(part, device=self._device).view(1, -1, 1, 1) for part in statistics)
        self._tokenizer, self._config = tokenizer.backend_tokenizer, text_encoder_config
        self._random: Random = np.random.default_rng(seed)
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        text: dict[Shape, float] = {(size, 0): weight for size, weight in preset.text_shapes.items()}
        self._text_shapes, self._text_weights = _normalised(text)
        self._edit_shapes, self._edit_weights = _normalised(dict(preset.edit_shapes))
        self.layouts = {shape: self._layouts(shape) for shape in (*self._text_shapes, *self._edit_shapes)}
        self.entries: dict[Shape, Entries] = {}
        for shapes, weights, count in (
            (self._text_shapes, self._text_weights, preset.pool),
            (self._edit_shapes, self._edit_weights, int(preset.pool * preset.edit_share)),
        ):
            for shape, weight in zip(shapes, weights, strict=True):
                self.entries[shape] = self._make(shape, max(16, int(weight * count)))

    def draw(self, batch_size: int) -> tuple[Shape, Entries]:
        """Entries of one shape; ``batch_size`` counts target pictures of 128 x 128 without references."""
        shape = self._shape()
        entries = self.entries[shape]
        tokens = self._image_tokens(shape) + _TEXT_TOKENS
        count = max(4, batch_size * (64 + _TEXT_TOKENS) // tokens)
        return shape, entries.rows(torch.randint(len(entries.ids), (count,), device=self._device))

    def refill(self, count: int) -> None:
        """Put ``count`` new entries in the place of old ones, of one shape."""
        shape = self._shape()
        old = self.entries[shape]
        new = self._make(shape, min(count, len(old.ids)))
        at = torch.randperm(len(old.ids), device=self._device)[: len(new.ids)]
        for mine, fresh in zip(old.parts(), new.parts(), strict=True):
            mine[at] = fresh

    def features_input(self, pictures: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] → patches [N, n, 3 · PATCH²], normalised, as ``models.vision.patchify`` orders them."""
        mean, std = (torch.tensor(part, device=self._device) for part in (_CLIP_MEAN, _CLIP_STD))
        x = (pictures.float() / 255 - mean) / std
        count, height, width, _ = x.shape
        side = MERGE * PATCH
        x = x.view(count, height // side, MERGE, PATCH, width // side, MERGE, PATCH, 3)
        return x.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(count, -1, 3 * PATCH * PATCH)

    def _shape(self) -> Shape:
        edit = self._random.random() < self._preset.edit_share
        shapes, weights = (self._edit_shapes, self._edit_weights) if edit else (self._text_shapes, self._text_weights)
        return shapes[self._random.choice(len(shapes), p=weights)]

    def _condition_size(self, shape: Shape) -> tuple[int, int]:
        (width, height), _ = shape
        return scaled(self._preset.condition_side, width / height)

    def _before(self, shape: Shape) -> str:
        """What stands before the instruction."""
        width, height = self._condition_size(shape)
        tokens = IMAGE_TOKEN * (width * height // (MERGE * PATCH) ** 2)
        return "".join(f"Picture {k}: <|vision_start|>{tokens}<|vision_end|>" for k in range(1, shape[1] + 1))

    @staticmethod
    def _image_tokens(shape: Shape) -> int:
        (width, height), references = shape
        return width // 16 * (height // 16) * (1 + references)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def _padded(self, shape: Shape, texts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Token ids of texts → int64 [N, L] with what stands around them in the template, and the real lengths [N].

        A text is tokenised alone: what is next to it, a line end or a special token, never joins it.
        """
        template, drop = (EDIT_TEMPLATE, EDIT_DROP) if shape[1] else (TEMPLATE, DROP)
        start, _, end = template.partition("{}")
        before, after = self._ids(start + self._before(shape))[drop:], self._ids(end)
        length = len(before) + _TEXT_TOKENS + len(after)
        length += -(length + self._image_tokens(shape)) % _ALIGNED
        ids = np.zeros((len(texts), length), dtype=np.int64)
        lengths = []
        for row, text in enumerate(texts):
            whole = [*before, *text, *after]
            ids[row, : len(whole)] = whole
            lengths.append(len(whole))
        return torch.from_numpy(ids).to(self._device), torch.tensor(lengths).to(self._device)

    def _layouts(self, shape: Shape) -> Layouts:
        (width, height), references = shape
        template, drop = (EDIT_TEMPLATE, EDIT_DROP) if references else (TEMPLATE, DROP)
        ids, lengths = self._padded(shape, [self._ids(" ")])
        prefix = self._ids(template.partition("{}")[0])
        whole = [*prefix, *ids[0].tolist()]
        condition = self._condition_size(shape)
        grid = (condition[0] // (MERGE * PATCH), condition[1] // (MERGE * PATCH))
        runs = image_runs(whole, self._config.image_token_id)
        patch_grid = (height // 16, width // 16)
        return Layouts(
            text=text_layout(self._config.text_config, whole, drop, runs, [grid] * references, self._device),
            dit=dit_layout(self._preset.axes, [patch_grid] * (1 + references), ids.shape[1], self._device),
            target_tokens=patch_grid[0] * patch_grid[1],
            rotary=picture_rotary(self._config.vision_config, condition, self._device) if references else None,
            empty=(ids[0], int(lengths[0])),
        )

    @torch.no_grad()  # not inference mode: its tensors could not be renewed
    def _make(self, shape: Shape, count: int) -> Entries:
        made = [self._encode(shape, min(_ENCODE, count - start)) for start in range(0, count, _ENCODE)]
        return Entries(*(torch.cat(parts) for parts in zip(*(entries.parts() for entries in made), strict=True)))

    def _example(self, shape: Shape, index: int) -> tuple[str, list[Scene]]:
        """A text, and the scenes: the target, then what is sent. ``index`` goes round the kinds of edits."""
        size, references = shape
        if not references:
            scene = self._scenes.draw(self._random, size)
            return self._captions.caption(self._random, scene), [scene]
        kinds = ("combine",) if references > 1 else KINDS[:-1]
        edit = self._edits.draw(self._random, kinds[index % len(kinds)], size, references)
        return edit.instruction, [edit.target, *edit.sources]

    def _encode(self, shape: Shape, count: int) -> Entries:
        references = shape[1]
        columns: list[list[Scene]] = [[] for _ in range(1 + references)]  # targets, first pictures, second ones, …
        texts: list[list[int]] = []
        while len(texts) < count:
            text, scenes = self._example(shape, len(texts))
            if len(ids := self._ids(text)) <= _TEXT_TOKENS:
                texts.append(ids)
                for column, scene in zip(columns, scenes, strict=True):
                    column.append(scene)
        latents, pictures = [], []
        for place, column in enumerate(columns):
            drawn = render(self._sprites, batch(column, self._sprites.side).to(self._device))
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                mean = self._still.encode(drawn)[0]
            latents.append(pack((mean.float() - self._mean) / self._std))
            if place:
                width, height = self._condition_size(shape)
                pictures.append(to_bytes(F.interpolate(drawn, (height, width), mode="bicubic", antialias=True)))
        shown = torch.stack(pictures, dim=1) if pictures else torch.empty(count, 0, device=self._device)
        return Entries(torch.cat(latents, dim=1).to(self._dtype), shown, *self._padded(shape, texts))


def pack(latents: Tensor) -> Tensor:
    """[N, C, 2h, 2w] → tokens [N, h·w, 4C], as ``sampling.latents.pack_latents`` does one by one."""
    count, channels, height, width = latents.shape
    patches = latents.reshape(count, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(count, height // 2 * (width // 2), 4 * channels)


def _normalised(weights: dict[Shape, float]) -> tuple[list[Shape], Any]:
    values = np.array(list(weights.values()))
    return list(weights), values / values.sum()
