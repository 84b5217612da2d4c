"""A checkpoint without weights: the configs alone make models that run, the same ones every time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from oracle import request
from transformers import Qwen2_5_VLForConditionalGeneration
from typer.testing import CliRunner

from ditpack.models.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ditpack.models.families import load_sampler
from ditpack.models.prompt import PromptTokenizer
from ditpack.models.published import write_published_configs
from ditpack.models.text_encoder import load_text_encoder
from ditpack.models.vae import load_vae_decoder
from ditpack.sampling.qwen_image import Conditioning

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bare(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bare") / "tiny"
    shutil.copytree(tiny_checkpoint, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    return directory


def latents_of(checkpoint: Checkpoint) -> torch.Tensor:
    encoder = load_text_encoder(checkpoint, CPU, torch.float32)
    prompt, negative = encoder.encode([PromptTokenizer(checkpoint).encode(text) for text in ("a red kite", " ")])
    sampler = load_sampler(checkpoint, CPU, torch.float32)
    member = sampler.begin(request(width=64, height=48, num_inference_steps=3), Conditioning(prompt, negative))
    pack = sampler.pack([member])
    while member.steps_left:
        sampler.step(pack)
    return sampler.finish(member)()


def test_configs_alone_make_images_the_same_each_time(bare: Path) -> None:
    checkpoint = open_checkpoint(bare, weights="random")
    first, second = latents_of(checkpoint), latents_of(checkpoint)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert 0.1 < first.std() < 10
    image = load_vae_decoder(checkpoint, CPU, torch.float32).decode([first])[0]
    assert image.shape == (48, 64, 3)
    assert image.std() > 1


def test_without_being_asked_for_they_are_missing(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="safetensors file"):
        open_checkpoint(bare)
    monkeypatch.setenv("DITPACK_WEIGHTS", "random")
    assert open_checkpoint(bare).weights == "random"
    with pytest.raises(CheckpointError, match="safetensors file"):
        open_checkpoint(bare, weights="stored")
    with pytest.raises(CheckpointError, match="weights = 'dummy': must be one of stored, random"):
        open_checkpoint(bare, weights="dummy")


def test_the_published_size(tmp_path: Path) -> None:
    write_published_configs(tmp_path)
    checkpoint = open_checkpoint(tmp_path, weights="random")
    assert checkpoint.limits(2048 * 2048).default_width == 1024
    assert PromptTokenizer(checkpoint).encode("a red kite")
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel.from_config(checkpoint.transformer_config)
        vae = AutoencoderKLQwenImage.from_config(checkpoint.vae_config)
        text_config = Qwen2_5_VLForConditionalGeneration.config_class.from_pretrained(tmp_path / "text_encoder")
        text_encoder = Qwen2_5_VLForConditionalGeneration(text_config)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (transformer, vae, text_encoder)]
    assert [round(size / 1e9, 2) for size in sizes] == [20.43, 0.13, 8.29]


def test_the_command(tmp_path: Path) -> None:
    import typer

    from ditpack.cli.make_checkpoint import make_checkpoint

    app = typer.Typer()
    app.command()(make_checkpoint)
    done = CliRunner().invoke(app, ["qwen-image", str(tmp_path / "full")])
    assert done.exit_code == 0, done.output
    assert "--weights random" in done.output
