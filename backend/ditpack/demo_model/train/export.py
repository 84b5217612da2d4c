"""The trained parts as a checkpoint in diffusers' layout, with card and notices."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ditpack.demo_model.train.networks import MERGE, PATCH
from ditpack.demo_model.train.presets import Preset
from ditpack.models.tiny import qwen_image_scheduler

_SHARD_SIZE = "15MB"
_HERE = Path(__file__).parent
NOTICES = "THIRD_PARTY_NOTICES.md"
CARD = "MODEL_CARD.md"


def export(
    directory: Path,
    preset: Preset,
    vae: Any,
    transformer: Any,
    text_encoder: Any,
    tokenizer: Any,
    facts: Mapping[str, Any],
) -> None:
    """Write the checkpoint, in bf16, in the place of what is in ``directory``. ``facts`` fill the card's blanks.

    The pipeline class is that of Qwen-Image-Edit-2509, whose checkpoints make images from text alone too.
    """
    shutil.rmtree(directory, ignore_errors=True)  # shards of an older save would stay beside a new index
    parts = {
        name: copy.deepcopy(part).to("cpu", torch.bfloat16).eval()
        for name, part in (("vae", vae), ("transformer", transformer), ("text_encoder", text_encoder))
    }
    QwenImagePipeline(scheduler=qwen_image_scheduler(), tokenizer=tokenizer, **parts).save_pretrained(
        directory, max_shard_size=_SHARD_SIZE
    )
    token = PATCH * MERGE
    Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=1, min_pixels=token * token, max_pixels=1024 * 1024
    ).save_pretrained(directory / "processor")
    tokenizer.save_pretrained(directory / "processor")
    index = json.loads((directory / "model_index.json").read_text())
    index |= {"_class_name": "QwenImageEditPlusPipeline", "processor": ["transformers", "Qwen2VLProcessor"]}
    _write_json(directory / "model_index.json", index)
    _write_json(
        directory / "ditpack.json",
        {
            "default_width": preset.default_side,
            "default_height": preset.default_side,
            "min_size": 64,
            "reference_side": preset.reference_side,
            "condition_side": preset.condition_side,
        },
    )
    shutil.copyfile(_HERE / "notices.md", directory / NOTICES)
    blanks = {
        f"{name}_parameters": f"{sum(weight.numel() for weight in part.parameters()) / 1e6:.1f} M"
        for name, part in parts.items()
    }
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / 1e6
    text = (_HERE / "card.md").read_text()
    for name, value in {**blanks, "megabytes": f"{size:.1f}", "vocabulary": len(tokenizer), **facts}.items():
        text = text.replace("{" + name + "}", str(value))
    (directory / CARD).write_text(text)
    for file in directory.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors leaves them to the owner alone


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")
