"""A seeded random MammothModa2 checkpoint with the real names and few parameters, for tests. Its pictures are noise.

Only what the image needs: the diffusion transformer, its refiner and the VAE, no language model.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor

from ditpack.models.mammoth_config import MODEL_TYPE
from ditpack.models.tiny import new_directory, randomise

LLM_WIDTH = 24
_SHARDS = 2  # as the real one is stored
_VAE = {
    "_class_name": "AutoencoderKL",
    "latent_channels": 4,
    "block_out_channels": [8, 8, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "scaling_factor": 0.36,
    "shift_factor": 0.12,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def tiny_mammoth_config(nested: bool = False) -> dict[str, Any]:
    """The root config; ``nested`` as in the Dev checkpoints, whose refiner is part of the transformer."""
    llm_type = "mammothmoda2_qwen3_vl" if nested else "mammothmoda2_qwen2_5_vl"
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["Mammothmoda2Model"],
        "llm_config": {
            "model_type": llm_type,
            "text_config": {"hidden_size": LLM_WIDTH, "gen_vocab_start_index": 1000},
            "image_token_id": 901,
            "video_token_id": 902,
            "vision_start_token_id": 903,
            "vision_end_token_id": 904,
        },
        "gen_dit_config": {
            "_class_name": "Transformer2DModel",
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 48,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 32,
            "axes_dim_rope": [4, 4, 8],
            "axes_lens": [30, 30, 30],  # too small on purpose, as the real one: gen_axes_lens counts
            "timestep_scale": 1000.0,
        },
        "gen_vae_config": _VAE,
        "gen_image_condition_refiner_config": {"num_queries": 7, "num_layers": 2, "num_heads": 3},
        "gen_condition_mode": "image",
        "gen_axes_dim_rope": [4, 4, 8],
        "gen_axes_lens": [200, 200, 200],
    }


def write_tiny_mammoth_checkpoint(directory: Path, seed: int = 0, nested: bool = False) -> None:
    """Write a checkpoint (bf16, less than 1 MB) whose weights depend on ``seed`` alone.

    Raises:
        CheckpointError: when ``directory`` exists and is not an empty folder.
    """
    new_directory(directory)
    generator = torch.Generator().manual_seed(seed)
    config = tiny_mammoth_config(nested)
    with torch.random.fork_rng(devices=[]):  # building the module draws from the global generator
        vae = AutoencoderKL.from_config(_VAE)
    randomise(vae, generator)
    weights = {name: _random(name, shape, generator) for name, shape in _shapes(config).items()}
    weights |= {f"gen_vae.{name}": tensor.contiguous() for name, tensor in vae.state_dict().items()}
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for index in range(_SHARDS):
        file = f"model-{index + 1:05}-of-{_SHARDS:05}.safetensors"
        shard = {name: weights[name] for name in names[index::_SHARDS]}
        save_file(shard, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index_json = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    settings = {"default_width": 64, "default_height": 64, "min_size": 32}
    (directory / "ditpack.json").write_text(json.dumps(settings, indent=2) + "\n")


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every weight of the transformer and its refiner by its stored name, those for reference images included."""
    dit, refiner = config["gen_dit_config"], config["gen_image_condition_refiner_config"]
    nested = config["llm_config"]["model_type"] == "mammothmoda2_qwen3_vl"
    dim, time_dim = dit["hidden_size"], min(dit["hidden_size"], 1024)
    patch = dit["patch_size"] ** 2 * dit["in_channels"]
    head_dim = dim // dit["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"image_index_embedding": (5, dim)}

    def linear(name: str, out: int, into: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def swiglu(name: str, width: int, inner: int) -> None:
        for part, (out, into) in enumerate([(inner, width), (width, inner), (inner, width)], start=1):
            linear(f"{name}.linear_{part}", out, into, bias=False)

    def block(name: str, modulated: bool) -> None:
        kv_dim = dit["num_kv_heads"] * head_dim
        for layer, out in (("to_q", dim), ("to_k", kv_dim), ("to_v", kv_dim), ("to_out.0", dim)):
            linear(f"{name}.attn.{layer}", out, dim, bias=False)
        shapes[f"{name}.attn.norm_q.weight"] = shapes[f"{name}.attn.norm_k.weight"] = (head_dim,)
        swiglu(f"{name}.feed_forward", dim, math.ceil(4 * dim / dit["multiple_of"]) * dit["multiple_of"])
        for norm in ("norm1.norm" if modulated else "norm1", "ffn_norm1", "norm2", "ffn_norm2"):
            shapes[f"{name}.{norm}.weight"] = (dim,)
        if modulated:
            linear(f"{name}.norm1.linear", 4 * dim, time_dim)

    for name in ("x_embedder", "ref_image_patch_embedder"):
        linear(name, dim, patch)
    linear("time_caption_embed.timestep_embedder.linear_1", time_dim, 256)
    linear("time_caption_embed.timestep_embedder.linear_2", time_dim, time_dim)
    shapes["time_caption_embed.caption_embedder.0.weight"] = (LLM_WIDTH,)
    linear("time_caption_embed.caption_embedder.1", dim, LLM_WIDTH)
    for refiners, modulated in (("noise_refiner", True), ("ref_image_refiner", True), ("context_refiner", False)):
        for index in range(dit["num_refiner_layers"]):
            block(f"{refiners}.{index}", modulated)
    for index in range(dit["num_layers"]):
        block(f"layers.{index}", modulated=True)
    linear("norm_out.linear_1", dim, time_dim)
    linear("norm_out.linear_2", patch, dim)
    shapes = {f"gen_transformer.{name}": shape for name, shape in shapes.items()}

    place = "gen_transformer.time_caption_embed.image_embedder" if nested else "gen_image_condition_refiner"
    width = dim if nested else LLM_WIDTH
    shapes[f"{place}.query"] = (1, refiner["num_queries"], width)
    shapes[f"{place}.input_proj.0.weight"] = (LLM_WIDTH,)
    linear(f"{place}.input_proj.1", width, LLM_WIDTH)
    for index in range(refiner["num_layers"]):
        layer = f"{place}.layers.{index}"
        for norm in ("ln_q1", "ln_q2", "ln_ffn"):
            shapes[f"{layer}.{norm}.weight"] = (width,)
        for attention in ("self_attn", "cross_attn"):
            shapes[f"{layer}.{attention}.in_proj_weight"] = (3 * width, width)
            shapes[f"{layer}.{attention}.in_proj_bias"] = (3 * width,)
            linear(f"{layer}.{attention}.out_proj", width, width)
        swiglu(f"{layer}.ffn", width, math.ceil(4 * width / 256) * 256)
    return shapes


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random all over, norms and biases too, and of a size that keeps outputs of order 1."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        noise = 0.2 * noise
    elif len(shape) == 1:
        noise = 1 + 0.2 * noise
    else:
        noise = noise / math.sqrt(shape[-1])
    return noise.to(torch.bfloat16)
