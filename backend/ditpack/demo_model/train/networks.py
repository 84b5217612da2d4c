"""The parts of the pipeline with fresh weights, from a preset, and its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2TokenizerFast

from ditpack.demo_model.train.presets import Preset
from ditpack.models.prompt import DROP, EDIT_DROP, EDIT_TEMPLATE, TEMPLATE
from ditpack.models.tiny_tokenizer import write_tokenizer

Z_DIM = 16
PATCH, MERGE = 16, 2  # of the vision tower: a token is 32 pixels wide, and all sizes are multiples of that


def build_tokenizer(directory: Path, texts: Sequence[str], preset: Preset) -> Any:
    """Train a tokenizer on ``texts`` into ``directory``, unless one is there, and read it."""
    if not (directory / "tokenizer.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(directory, texts, preset.text[-1], {TEMPLATE: DROP, EDIT_TEMPLATE: EDIT_DROP})
    return Qwen2TokenizerFast.from_pretrained(directory, local_files_only=True)


def build_vae(preset: Preset) -> Any:
    """A VAE for still pictures: its convolutions are 3-D as the class has them, but none works along time."""
    base, multipliers, blocks = preset.vae
    vae = AutoencoderKLQwenImage(
        base_dim=base,
        z_dim=Z_DIM,
        dim_mult=list(multipliers),
        num_res_blocks=blocks,
        attn_scales=[],
        temperal_downsample=[False] * (len(multipliers) - 1),  # sic; its length says how often pictures are halved
        latents_mean=[0.0] * Z_DIM,
        latents_std=[1.0] * Z_DIM,
    )
    with torch.no_grad():  # residual branches start as nothing, the posterior with little noise
        for module in vae.modules():
            last = getattr(module, "conv2", None) or getattr(module, "proj", None)
            if isinstance(last, nn.Conv2d | nn.Conv3d):
                last.weight.zero_()
                if last.bias is not None:
                    last.bias.zero_()
        vae.quant_conv.bias[Z_DIM:] = -5.0
    return vae


def build_transformer(preset: Preset) -> Any:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * Z_DIM,
        out_channels=Z_DIM,
        num_layers=preset.layers,
        attention_head_dim=preset.head_dim,
        num_attention_heads=preset.heads,
        joint_attention_dim=preset.text[0],
        axes_dims_rope=preset.axes,
    )


def build_text_encoder(preset: Preset, tokenizer: Any) -> Any:
    width, layers, heads, key_value_heads, mlp, _ = preset.text
    head_dim = width // heads
    side = head_dim // 2 // 3 // 2 * 2  # what the height and the width axis get of half a head
    vision_width, vision_layers, vision_heads, vision_mlp = preset.vision

    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads,
            "max_position_embeddings": 2048,
            "use_cache": False,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [head_dim // 2 - 2 * side, side, side],
            },
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        vision_config={
            "depth": vision_layers,
            "hidden_size": vision_width,
            "intermediate_size": vision_mlp,
            "num_heads": vision_heads,
            "out_hidden_size": width,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 1,
            "window_size": PATCH * MERGE,
            "fullatt_block_indexes": list(range(vision_layers)),  # no windows: its pictures are small
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)
