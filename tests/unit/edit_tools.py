"""Edits by our own stages, as the ensemble runs them, and diffusers' edit pipelines as their oracle."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from oracle import reference_transformer
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2TokenizerFast, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import load_sampler
from ditpack.models.prompt import PromptTokenizer
from ditpack.models.text_encoder import load_text_encoder
from ditpack.models.vae_encoder import load_vae_encoder
from ditpack.reference_images import ImagePreparer
from ditpack.request import ImageRequest, Limits, resolve
from ditpack.sampling.qwen_image import Conditioning, Denoising

CPU = torch.device("cpu")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth colourful picture: noise would be flattened by resizing, and a flat one would hide wrong places."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


class Stages:
    """All models of one checkpoint, fp32 on the CPU."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = open_checkpoint(path)
        self.limits: Limits = self.checkpoint.limits(2048 * 2048)
        self.images = ImagePreparer(self.checkpoint)
        self.tokenizer = PromptTokenizer(self.checkpoint)
        self.text_encoder = load_text_encoder(self.checkpoint, CPU, torch.float32)
        self.vae_encoder = load_vae_encoder(self.checkpoint, CPU, torch.float32)
        self.sampler = load_sampler(self.checkpoint, CPU, torch.float32)

    def begin(self, values: dict[str, Any], images: list[Image.Image]) -> Denoising:
        """``values`` are wire names; no images: text to image."""
        return self.sampler.begin(*self.prepare(values, images))

    def prepare(self, values: dict[str, Any], images: list[Image.Image]) -> tuple[ImageRequest, Conditioning]:
        """What the models before ``dit`` make of a request."""
        prepared = [self.images.prepare(encoded(image), number) for number, image in enumerate(images, 1)]
        references = [dataclasses.asdict(image.about) for image in prepared]
        request = resolve({**values, "REFERENCES": references}, self.limits)
        shown = [image.condition for image in prepared]
        tokens = [self.images.tokens(image) for image in prepared]
        prompts = [request.prompt] + ([] if request.negative_prompt is None else [request.negative_prompt])
        ids = [self.tokenizer.encode(prompt, image_tokens=tokens) for prompt in prompts]
        embeds = self.text_encoder.encode(ids, [shown] * len(ids))
        latents = torch.cat(self.vae_encoder.encode([one.reference for one in prepared])) if prepared else None
        return request, Conditioning(embeds[0], embeds[1] if len(ids) == 2 else None, latents)

    def denoise(self, members: list[Denoising]) -> list[torch.Tensor]:
        """The final latent tokens of ``members``, in one pack as long as they last."""
        while active := [member for member in members if member.steps_left]:
            pack = self.sampler.pack(active)
            for _ in range(pack.steps_left):
                self.sampler.step(pack)
        return [member.latents for member in members]


class _StillProcessor(Qwen2VLProcessor):
    """Without its video half, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None


def _reference_text_encoder(path: Path) -> Qwen2_5_VLForConditionalGeneration:
    """transformers' own, which here gets the token types that its processor made.

    diffusers (0.42.1) does not pass them on, and without them transformers 5 places image tokens as if they were text
    (huggingface/diffusers#14194); with transformers 4, and in training, they were placed as here.
    """
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(path / "text_encoder", dtype=torch.float32)

    def add_token_types(_module: torch.nn.Module, _args: Any, options: dict[str, Any]) -> Any:
        return (), {**options, "mm_token_type_ids": (options["input_ids"] == model.config.image_token_id).int()}

    model.register_forward_pre_hook(add_token_types, with_kwargs=True)
    return model.eval()


def edit_pipeline(path: Path) -> Any:
    """The checkpoint's own pipeline, fp32."""
    checkpoint = open_checkpoint(path)
    kind = {"QwenImageEditPipeline": QwenImageEditPipeline, "QwenImageEditPlusPipeline": QwenImageEditPlusPipeline}
    tokenizer = Qwen2TokenizerFast.from_pretrained(path / "tokenizer")
    pipeline = kind[checkpoint.family](
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(path / "scheduler"),
        vae=AutoencoderKLQwenImage.from_pretrained(path / "vae", dtype=torch.float32),
        text_encoder=_reference_text_encoder(path),
        tokenizer=tokenizer,
        processor=_StillProcessor(Qwen2VLImageProcessorPil.from_pretrained(path / "processor"), tokenizer),
        transformer=reference_transformer(path),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextmanager
def areas_of(path: Path) -> Iterator[None]:
    """Inside, the pipelines scale images to the areas that the checkpoint's ditpack.json names."""
    editing = open_checkpoint(path).editing
    assert editing is not None
    areas = {1024 * 1024: editing.reference_side**2, 384 * 384: editing.condition_side**2}
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
            original = module.calculate_dimensions
            patch.setattr(module, "calculate_dimensions", lambda area, ratio, f=original: f(areas[area], ratio))
        yield


def reference_edit(path: Path, values: dict[str, Any], images: list[Image.Image]) -> torch.Tensor:
    """The final latent tokens of the checkpoint's pipeline."""
    scale = values.get("TRUE_CFG_SCALE", 4.0)
    with areas_of(path):
        return edit_pipeline(path)(
            image=images if len(images) > 1 else images[0],
            prompt=values["PROMPT"],
            negative_prompt=values.get("NEGATIVE_PROMPT", " ") if scale > 1 else None,
            true_cfg_scale=scale,
            width=values.get("WIDTH"),
            height=values.get("HEIGHT"),
            num_inference_steps=values["NUM_INFERENCE_STEPS"],
            generator=torch.Generator("cpu").manual_seed(values["SEED"]),
            output_type="latent",
        ).images[0]
