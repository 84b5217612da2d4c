"""The tiny checkpoint: whole, small, reproducible, and random in a way that makes every input matter."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ditpack.cli.make_checkpoint import make_checkpoint
from ditpack.models.checkpoint import CheckpointError, open_checkpoint
from ditpack.models.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def pipeline(tiny_checkpoint: Path) -> Any:
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_seed_writes_the_same_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    write_tiny_checkpoint(tmp_path / "again", seed=0)
    assert torch.equal(torch.get_rng_state(), before)  # nor does it disturb the caller's generator
    assert digests(tmp_path / "again") == digests(tiny_checkpoint)
    write_tiny_checkpoint(tmp_path / "other", seed=1)
    other = digests(tmp_path / "other")
    assert other.keys() == digests(tiny_checkpoint).keys()
    weights = [name for name in other if name.endswith(".safetensors")]
    assert len(weights) == 4  # the transformer in two shards
    assert all(other[name] != digests(tiny_checkpoint)[name] for name in weights)


def test_its_numbers(tiny_checkpoint: Path, pipeline: Any) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    assert checkpoint.vae_scale_factor == 8
    assert checkpoint.settings.min_size == 32
    assert (checkpoint.settings.default_width, checkpoint.settings.default_height) == (64, 64)
    modules = (pipeline.transformer, pipeline.text_encoder, pipeline.vae)
    assert sum(parameter.numel() for module in modules for parameter in module.parameters()) < 600_000
    # Every number of the scheduler is the embedded (and the real) model's.
    assert checkpoint.scheduler_config == open_checkpoint("embedded").scheduler_config


def test_more_layers(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, layers=3)  # an empty folder that exists will do
    assert open_checkpoint(tmp_path).transformer_config["num_layers"] == 3


def test_no_parameter_is_left_at_a_constant(pipeline: Any) -> None:
    for module in (pipeline.transformer, pipeline.text_encoder, pipeline.vae):
        for name, parameter in module.named_parameters():
            assert torch.isfinite(parameter).all(), name
            if parameter.numel() > 3:
                assert 0.01 < parameter.std() < 2, name


def test_every_input_of_the_transformer_matters(pipeline: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(1, 12, 64, generator=generator)
    text = torch.randn(1, 7, 32, generator=generator)

    @torch.no_grad()
    def forward(
        image: torch.Tensor, text: torch.Tensor, timestep: float, grid: tuple[int, int] = (3, 4)
    ) -> torch.Tensor:
        output: torch.Tensor = pipeline.transformer(
            hidden_states=image,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=None,
            timestep=torch.tensor([timestep]),
            img_shapes=[[(1, *grid)]],
            return_dict=False,
        )[0]
        return output

    base = forward(image, text, 0.9)
    assert 0.3 < base.std() < 3
    for other in (
        forward(image, text, 0.8),
        forward(image, text.flip(1), 0.9),
        forward(image, text[:, :6], 0.9),
        forward(image.flip(1), text, 0.9),
        forward(image, text, 0.9, grid=(4, 3)),
    ):
        assert (other - base).norm() > 0.01 * base.norm()


def test_prompt_guidance_seed_and_steps_change_the_image(pipeline: Any) -> None:
    def latents(prompt: str = "a red kite", scale: float = 4.0, steps: int = 4, seed: int = 1) -> torch.Tensor:
        result: torch.Tensor = pipeline(
            prompt,
            negative_prompt=" ",
            true_cfg_scale=scale,
            height=32,
            width=64,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        ).images
        return result

    base = latents()
    assert torch.isfinite(base).all()
    assert 0.3 < base.std() < 5
    for other in (latents(prompt="a blue cat"), latents(scale=2.0), latents(steps=5), latents(seed=2)):
        assert (other - base).norm() > 0.01 * base.norm()


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for directory in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(CheckpointError, match="not an empty folder"):
            write_tiny_checkpoint(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(make_checkpoint)
    target = tmp_path / "new" / "tiny"
    done = CliRunner().invoke(app, ["tiny", str(target), "--seed", "7"])
    assert done.exit_code == 0, done.output
    assert "seed 7" in done.output
    assert str(target) in done.output.replace("\n", "")
    open_checkpoint(target)
    again = CliRunner().invoke(app, ["tiny", str(target)])
    assert again.exit_code == 1
    assert "not an empty folder" in again.output
    mammoth = tmp_path / "mammoth"
    assert CliRunner().invoke(app, ["tiny-mammoth", str(mammoth)]).exit_code == 0
    assert open_checkpoint(mammoth).family == "mammothmoda2"
    assert CliRunner().invoke(app, ["huge", str(tmp_path / "x")]).exit_code == 2
