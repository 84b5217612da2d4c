"""A seeded random checkpoint with the real classes and very few parameters, for tests. Its pictures are noise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2TokenizerFast

from ditpack.models.checkpoint import CheckpointError
from ditpack.models.tiny_tokenizer import write_tiny_tokenizer

_Z_DIM = 16
_TEXT_WIDTH = 32
_TEXT_HEADS = 2
_HEAD_DIM = 16
_SHARD_SIZE = "400KB"  # small, so that the transformer is stored in shards as the real one is
_TEXT_TO_IMAGE = "QwenImagePipeline"
_PLAIN_VISION = {
    "depth": 1,
    "num_heads": 1,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "window_size": 14,
    "fullatt_block_indexes": [0],
}
# As in the real one, tokens of 2 x 2 patches, and a layer that attends within windows (of 2 x 2 tokens here).
_EDIT_VISION = {
    "depth": 2,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}


def write_tiny_checkpoint(
    directory: Path,
    seed: int = 0,
    layers: int = 2,
    pipeline: str = _TEXT_TO_IMAGE,
    zero_cond_t: bool = False,
) -> None:
    """Write a complete ``pipeline`` directory (bf16, about 1 MB) whose weights depend on ``seed`` alone.

    ``pipeline`` is QwenImagePipeline, QwenImageEditPipeline or QwenImageEditPlusPipeline; ``zero_cond_t`` is how
    Qwen-Image-Edit-2511 differs from the last's earlier checkpoints. Every parameter, norms and biases too, is random
    and of a size that lets text, timestep and modulation matter while all outputs stay of order 1.

    Raises:
        CheckpointError: when ``directory`` exists and is not an empty folder, or ``layers`` is below 1.
    """
    if layers < 1:
        raise CheckpointError(f"layers = {layers}: must be at least 1")
    new_directory(directory)
    generator = torch.Generator().manual_seed(seed)

    edits = pipeline != _TEXT_TO_IMAGE
    (directory / "tokenizer").mkdir()
    write_tiny_tokenizer(directory / "tokenizer", edits)
    tokenizer = Qwen2TokenizerFast.from_pretrained(directory / "tokenizer", local_files_only=True)
    with torch.random.fork_rng(devices=[]):  # building the modules draws from the global generator
        transformer = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * _Z_DIM,
            out_channels=_Z_DIM,
            num_layers=layers,
            attention_head_dim=_HEAD_DIM,
            num_attention_heads=4,
            joint_attention_dim=_TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
            zero_cond_t=zero_cond_t,
        )
        vae = AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=_Z_DIM,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=_numbers(generator, -0.5, 0.5),
            latents_std=_numbers(generator, 0.6, 1.6),
        )
        text_encoder = Qwen2_5_VLForConditionalGeneration(
            _text_config(tokenizer, _EDIT_VISION if edits else _PLAIN_VISION)
        )
    for module in (transformer, vae, text_encoder):
        randomise(module, generator)
    QwenImagePipeline(
        scheduler=qwen_image_scheduler(),
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
    ).save_pretrained(directory, max_shard_size=_SHARD_SIZE)
    settings = {"default_width": 64, "default_height": 64, "min_size": 32}
    if edits:
        settings |= {"reference_side": 64, "condition_side": 64 if pipeline == "QwenImageEditPipeline" else 96}
        _make_edit_pipeline(directory, pipeline, tokenizer)
    (directory / "ditpack.json").write_text(json.dumps(settings, indent=2) + "\n")


def _make_edit_pipeline(directory: Path, pipeline: str, tokenizer: Any) -> None:
    """Add the processor and name the pipeline. The processor's own class cannot be built without torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    Qwen2VLImageProcessorPil(min_pixels=28 * 28).save_pretrained(directory / "processor")
    tokenizer.save_pretrained(directory / "processor")
    file = directory / "model_index.json"
    index = json.loads(file.read_text())
    index |= {"_class_name": pipeline, "processor": ["transformers", "Qwen2VLProcessor"]}
    file.write_text(json.dumps(index, indent=2) + "\n")


def new_directory(directory: Path) -> None:
    """Make an empty folder; what is already there is not overwritten.

    Raises:
        CheckpointError: when ``directory`` exists and is not an empty folder.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory}: exists and is not an empty folder; nothing was written")
    directory.mkdir(parents=True, exist_ok=True)


def qwen_image_scheduler() -> Any:
    """The numbers of the real Qwen-Image."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def _text_config(tokenizer: Any, vision: dict[str, Any]) -> Any:
    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}  # adds up to half a head
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": _TEXT_HEADS,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "use_cache": False,
            "tie_word_embeddings": True,
            "rope_parameters": rotary,
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        vision_config={"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": _TEXT_WIDTH, **vision},
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def _numbers(generator: torch.Generator, low: float, high: float) -> list[float]:
    values = low + (high - low) * torch.rand(_Z_DIM, generator=generator)
    return [round(value, 4) for value in values.tolist()]


@torch.no_grad()
def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Set every parameter. The classes leave biases and norms at 0 and 1, which would hide a wrong use of them."""
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data.to(torch.bfloat16)
        if "embed_tokens" in name:
            parameter.copy_(noise)
        elif name.endswith("bias"):
            parameter.copy_(0.2 * noise)
        elif parameter.squeeze().dim() <= 1:  # the scales of norms; those of the VAE carry broadcast dimensions
            parameter.copy_(1 + 0.2 * noise)
        else:
            # One frame meets only one temporal slice of a causal 3-D kernel, so that axis adds nothing to the sum.
            kernel = math.prod(parameter.shape[-2:]) if parameter.dim() > 2 else 1
            gain = 0.4 if name == "decoder.conv_out.weight" else 1.0  # or much of every picture would clip to 0 and 255
            parameter.copy_(gain * noise / math.sqrt(parameter.shape[1] * kernel))
