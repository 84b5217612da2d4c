"""Opening a checkpoint: what is accepted, and that every refusal names file, key, value and what is allowed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ditpack.models.checkpoint import EMBEDDED, CheckpointError, find_weights, open_checkpoint

TRANSFORMER = "transformer/config.json"
VAE = "vae/config.json"
TEXT = "text_encoder/config.json"
SCHEDULER = "scheduler/scheduler_config.json"


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")


def edit(directory: Path, file: str, **changes: Any) -> None:
    """Change top-level keys of a json file; ``...`` removes the key."""
    path = directory / file
    values = json.loads(path.read_text()) if path.exists() else {}
    for key, value in changes.items():
        if value is ...:
            del values[key]
        else:
            values[key] = value
    path.write_text(json.dumps(values))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    return str(caught.value)


def test_embedded_is_the_default(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> None:
    assert open_checkpoint().path == open_checkpoint(None).path == open_checkpoint("embedded").path == EMBEDDED
    monkeypatch.setenv("DITPACK_CHECKPOINT", str(tiny_checkpoint))
    assert open_checkpoint("auto").path == open_checkpoint(None).path == tiny_checkpoint
    assert open_checkpoint("embedded").path == EMBEDDED
    monkeypatch.setenv("DITPACK_CHECKPOINT", "")
    assert open_checkpoint("auto").path == EMBEDDED


def test_embedded_numbers() -> None:
    checkpoint = open_checkpoint("embedded")
    assert checkpoint.vae_scale_factor == 8
    assert checkpoint.family == "QwenImageEditPlusPipeline"
    assert checkpoint.transformer_config["num_layers"] == 6
    assert checkpoint.scheduler_config["max_shift"] == 0.9
    assert checkpoint.text_config["hidden_size"] == checkpoint.transformer_config["joint_attention_dim"]
    limits = checkpoint.limits(max_pixels=512 * 512)
    assert (limits.default_width, limits.default_height, limits.min_size) == (128, 128, 64)
    assert (limits.size_multiple, limits.max_pixels) == (16, 512 * 512)


def test_embedded_is_small_and_says_where_it_comes_from() -> None:
    assert sum(file.stat().st_size for file in EMBEDDED.parent.rglob("*") if file.is_file()) <= 45_000_000
    card = (EMBEDDED / "MODEL_CARD.md").read_text()
    assert "{" not in card, "a blank that nobody filled"
    for source in ("@iconify-json/fluent-emoji-flat", "@iconify-json/noto", "python -m ditpack.demo_model.train"):
        assert source in card
    notices = (EMBEDDED / "THIRD_PARTY_NOTICES.md").read_text()
    assert "Copyright (c) Microsoft Corporation." in notices
    assert "Copyright 2013 Google, Inc." in notices


def test_sizes_without_and_with_ditpack_json(copy: Path) -> None:
    edit(copy, "ditpack.json", default_width=96)
    assert open_checkpoint(copy).settings.default_width == 96
    (copy / "ditpack.json").unlink()
    settings = open_checkpoint(copy).settings
    assert (settings.default_width, settings.default_height, settings.min_size) == (1024, 1024, 64)


def test_a_default_above_the_pixel_limit_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"64x64 exceeds max_pixels = 4095"):
        open_checkpoint(tiny_checkpoint).limits(max_pixels=4095)


def test_the_older_flat_text_encoder_config(copy: Path) -> None:
    path = copy / TEXT
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values.pop("text_config"), **values, "model_type": "qwen2_5_vl"}))
    assert open_checkpoint(copy).text_config["hidden_size"] == 32


@pytest.mark.parametrize(
    ("file", "changes", "expected"),
    [
        ("model_index.json", {"_class_name": "FluxPipeline"}, ["_class_name", "'FluxPipeline'", '"QwenImagePipeline"']),
        (
            "model_index.json",
            {"transformer": ["diffusers", "FluxTransformer2DModel"]},
            ["FluxT", "QwenImageTransformer2D"],
        ),
        ("model_index.json", {"vae": ...}, ["vae = (absent)", "AutoencoderKLQwenImage"]),
        ("model_index.json", {"scheduler": [None, None]}, ["scheduler", "FlowMatchEulerDiscreteScheduler"]),
        (TRANSFORMER, {"_class_name": "Other"}, ["_class_name", "'Other'", "QwenImageTransformer2DModel"]),
        (TRANSFORMER, {"joint_attention_dim": 48}, ["joint_attention_dim = 48", "hidden_size = 32"]),
        (TRANSFORMER, {"in_channels": 60}, ["in_channels = 60", "4 * z_dim = 64"]),
        (TRANSFORMER, {"out_channels": None}, ["out_channels = None", "z_dim = 16"]),
        (TRANSFORMER, {"axes_dims_rope": [4, 6, 8]}, ["axes_dims_rope = [4, 6, 8]", "attention_head_dim = 16", "18"]),
        (TRANSFORMER, {"axes_dims_rope": [4, 5, 7]}, ["axes_dims_rope = [4, 5, 7]", "even"]),
        (TRANSFORMER, {"axes_dims_rope": [8, 8]}, ["axes_dims_rope", "3 entries, has 2"]),
        (TRANSFORMER, {"patch_size": 1}, ["patch_size = 1", "must be 2"]),
        (TRANSFORMER, {"guidance_embeds": True}, ["guidance_embeds = True", "must be false"]),
        (TRANSFORMER, {"zero_cond_t": 1}, ["zero_cond_t = 1", "false or true"]),
        (TRANSFORMER, {"use_additional_t_cond": True}, ["use_additional_t_cond = True"]),
        (TRANSFORMER, {"use_layer3d_rope": True}, ["use_layer3d_rope = True"]),
        (TRANSFORMER, {"num_layers": 0}, ["num_layers = 0", "positive integer"]),
        (TRANSFORMER, {"num_layers": True}, ["num_layers = True", "positive integer"]),
        (TRANSFORMER, {"num_attention_heads": ...}, ["num_attention_heads", "missing key"]),
        (VAE, {"z_dim": 8}, ["latents_mean", "8 entries, has 16"]),
        (VAE, {"latents_std": [1.0] * 15}, ["latents_std", "16 entries, has 15"]),
        (VAE, {"latents_std": [1.0] * 15 + [0.0]}, ["latents_std", "positive"]),
        (VAE, {"latents_mean": [float("nan")] * 16}, ["latents_mean", "finite"]),
        (VAE, {"temperal_downsample": [False, True]}, ["temperal_downsample", "3 entries", "has 2"]),
        (TEXT, {"model_type": "qwen2_vl"}, ["model_type = 'qwen2_vl'", "qwen2_5_vl"]),
        (TEXT, {"architectures": ["Other"]}, ["architectures", "Qwen2_5_VLForConditionalGeneration"]),
        (SCHEDULER, {"_class_name": "DDIMScheduler"}, ["DDIMScheduler", "FlowMatchEulerDiscreteScheduler"]),
        (SCHEDULER, {"use_karras_sigmas": True}, ["use_karras_sigmas = True", "must be false"]),
        (SCHEDULER, {"shift_terminal": 1.5}, ["shift_terminal = 1.5", "between 0 and 1"]),
        ("ditpack.json", {"default_width": 100}, ["default_width = 100", "multiple of 16"]),
        ("ditpack.json", {"default_height": 16}, ["default_height = 16", "min_size = 32"]),
        ("ditpack.json", {"steps": 20}, ["steps = 20", "unknown key"]),
    ],
)
def test_a_config_that_does_not_fit_is_named(
    copy: Path, file: str, changes: dict[str, Any], expected: list[str]
) -> None:
    edit(copy, file, **changes)
    message = refusal(copy)
    assert str(copy / file) in message
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    "file",
    [
        "model_index.json",
        TRANSFORMER,
        VAE,
        TEXT,
        SCHEDULER,
        "vae/diffusion_pytorch_model.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
        "tokenizer/tokenizer_config.json",
    ],
)
def test_a_missing_file_is_named(copy: Path, file: str) -> None:
    (copy / file).unlink()
    message = refusal(copy)
    assert str((copy / file).parent) in message
    assert Path(file).name in message or "found none" in message


def test_a_tokenizer_may_be_two_files_but_not_one(copy: Path) -> None:
    (copy / "tokenizer/tokenizer.json").unlink()
    open_checkpoint(copy)
    (copy / "tokenizer/merges.txt").unlink()
    assert "merges.txt: missing file" in refusal(copy)


@pytest.mark.parametrize("folder", ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"])
def test_a_missing_folder_is_named(copy: Path, folder: str) -> None:
    shutil.rmtree(copy / folder)
    assert f"{copy / folder}: missing folder" in refusal(copy)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_json_is_named(copy: Path, content: bytes) -> None:
    (copy / VAE).write_bytes(content)
    assert str(copy / VAE) in refusal(copy)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nothing")
    assert "model_index.json: missing file" in refusal(tmp_path)


def test_weights_beside_a_stale_file_or_outside_are_refused(copy: Path) -> None:
    folder = copy / "transformer"
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert len(find_weights(folder)) == 2
    shutil.copy(
        folder / "diffusion_pytorch_model-00001-of-00002.safetensors", folder / index.removesuffix(".index.json")
    )
    assert "delete the stale one" in refusal(copy)
    (folder / index.removesuffix(".index.json")).unlink()
    edit(folder, index, weight_map={"img_in.weight": "../vae/diffusion_pytorch_model.safetensors"})
    assert "missing file" in refusal(copy)
    edit(folder, index, weight_map=3)
    assert "weight_map = 3" in refusal(copy)


def test_opening_and_tokenising_need_no_torch(tiny_checkpoint: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # importing torch now fails
        "from ditpack.models.checkpoint import open_checkpoint\n"
        "checkpoint = open_checkpoint(sys.argv[1])\n"
        "from ditpack.models.prompt import PromptTokenizer\n"
        "print(len(PromptTokenizer(checkpoint).encode('a red kite')))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_checkpoint)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 39
