"""Pictures from a checkpoint without a server: the stages of the ensembles one after the other, in packs."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import load_sampler, load_vae_decoder
from ditpack.models.prompt import PromptTokenizer
from ditpack.models.text_encoder import load_text_encoder
from ditpack.models.vae_encoder import load_vae_encoder
from ditpack.reference_images import ImagePreparer
from ditpack.request import ImageRequest, resolve
from ditpack.sampling.qwen_image import Conditioning

Pixels = npt.NDArray[np.uint8]
_MAX_PIXELS = 2048 * 2048


@dataclass(frozen=True, slots=True)
class Job:
    """A picture to paint: from ``prompt`` alone, or from ``pictures``, uint8 [H, W, 3] each, that it edits."""

    prompt: str
    size: tuple[int, int]  # (width, height) in pixels
    seed: int
    pictures: tuple[Pixels, ...] = ()


class Painter:
    """All models of one checkpoint on one device."""

    def __init__(
        self,
        checkpoint: str | Path,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        attention: str = "auto",
        quantization: str = "none",
    ) -> None:
        """Raises CheckpointError and UnusableError as the loaders do."""
        self.checkpoint = open_checkpoint(str(checkpoint))
        self.limits = self.checkpoint.limits(_MAX_PIXELS)
        self.sampler = load_sampler(self.checkpoint, device, dtype, attention, quantization)
        self.decoder = load_vae_decoder(self.checkpoint, device, dtype)
        self._tokenizer = PromptTokenizer(self.checkpoint)
        self._text_encoder = load_text_encoder(self.checkpoint, device, dtype)
        self.edits = self.checkpoint.editing is not None
        if self.edits:
            self._images = ImagePreparer(self.checkpoint)
            self._vae_encoder = load_vae_encoder(self.checkpoint, device, dtype)

    def prepare(self, jobs: Sequence[Job], steps: int, guidance: float) -> list[tuple[ImageRequest, Conditioning]]:
        """The requests and what they are conditioned on."""
        prepared, ids, shown = [], [], []
        for job in jobs:
            images = [self._images.prepare(_png(pixels), k) for k, pixels in enumerate(job.pictures, 1)]
            values = {
                "PROMPT": job.prompt,
                "WIDTH": job.size[0],
                "HEIGHT": job.size[1],
                "SEED": job.seed,
                "NUM_INFERENCE_STEPS": steps,
                "TRUE_CFG_SCALE": guidance,
                "REFERENCES": [dataclasses.asdict(image.about) for image in images],
            }
            request = resolve(values, self.limits)
            tokens = [self._images.tokens(image) for image in images]
            for prompt in (request.prompt, request.negative_prompt):
                if prompt is not None:
                    ids.append(self._tokenizer.encode(prompt, image_tokens=tokens))
                    shown.append([image.condition for image in images])
            references = self._vae_encoder.encode([image.reference for image in images]) if images else None
            prepared.append((request, None if references is None else torch.cat(references)))
        embeds = iter(self._text_encoder.encode(ids, shown))
        return [
            (request, Conditioning(next(embeds), next(embeds) if request.guided else None, references))
            for request, references in prepared
        ]

    def latents(self, jobs: Sequence[Job], steps: int, guidance: float) -> list[torch.Tensor]:
        """The finished latents of ``jobs``, all in one pack, fp32 [z_dim, h, w] each."""
        members = [self.sampler.begin(*ready) for ready in self.prepare(jobs, steps, guidance)]
        while active := [member for member in members if member.steps_left]:
            pack = self.sampler.pack(active)
            for _ in range(pack.steps_left):
                self.sampler.step(pack)
                self.sampler.throttle()
        return [self.sampler.finish(member)() for member in members]

    def paint(
        self, jobs: Sequence[Job], steps: int = 20, guidance: float = 3.0, together: int = 32
    ) -> Iterator[list[Pixels]]:
        """uint8 [H, W, 3] a job, in their order; ``together`` jobs make a pack, and each pack's come at once."""
        for start in range(0, len(jobs), together):
            yield self.decoder.decode(self.latents(jobs[start : start + together], steps, guidance))


def own_precision(device: torch.device) -> torch.dtype:
    """What checkpoints are served in there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _png(pixels: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
