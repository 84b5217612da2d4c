"""The published Qwen-Image's configs without its weights: with ``weights: random``, enough to measure its speed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig

from ditpack.models.checkpoint import FAMILIES
from ditpack.models.tiny import new_directory, qwen_image_scheduler
from ditpack.models.tiny_tokenizer import write_tiny_tokenizer


def write_published_configs(directory: Path) -> None:
    """Write a QwenImagePipeline directory of the published size: configs and, instead of Qwen2.5's, a small tokenizer.

    diffusers' and transformers' defaults are the published numbers, but for the language model's. The tokenizer makes
    more tokens of a text than the published one.

    Raises:
        CheckpointError: when ``directory`` exists and is not an empty folder.
    """
    new_directory(directory)
    (directory / "tokenizer").mkdir()
    write_tiny_tokenizer(directory / "tokenizer")
    with torch.device("meta"):
        QwenImageTransformer2DModel().save_config(directory / "transformer")
        AutoencoderKLQwenImage().save_config(directory / "vae")
    qwen_image_scheduler().save_config(directory / "scheduler")
    _text_encoder().save_pretrained(directory / "text_encoder")
    components = FAMILIES["QwenImagePipeline"]
    index = {"_class_name": "QwenImagePipeline"} | {
        name: ["transformers" if name in ("text_encoder", "tokenizer") else "diffusers", classes[0]]
        for name, classes in components.items()
    }
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def _text_encoder() -> Qwen2_5_VLConfig:
    """Qwen2.5-VL-7B-Instruct."""
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "use_cache": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
        tie_word_embeddings=False,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )
