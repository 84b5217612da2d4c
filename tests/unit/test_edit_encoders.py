"""The models before the denoising: the VAE's encoder and the vision path of the text encoder, alone and in batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from edit_tools import Stages, edit_pipeline, picture
from PIL import Image
from typer.testing import CliRunner

from ditpack.cli.make_checkpoint import make_checkpoint
from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import CheckpointError, open_checkpoint
from ditpack.models.prompt import EDIT_DROP, PromptTokenizer
from ditpack.models.text_encoder import load_text_encoder
from ditpack.models.vae_encoder import load_vae_encoder
from ditpack.models.vision import image_runs, multimodal_positions
from ditpack.reference_images import ImagePreparer
from ditpack.sampling.latents import pack_latents

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stages(tiny_edit_2509_checkpoint: Path) -> Stages:
    return Stages(tiny_edit_2509_checkpoint)


def pixels(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.array(picture(width, height, seed))


def test_the_vae_encoder_equals_the_pipeline(stages: Stages) -> None:
    """The posterior's mode, normalised with the checkpoint's numbers."""
    pipeline = edit_pipeline(stages.checkpoint.path)
    image = pixels(96, 64)
    with torch.no_grad():
        tensor = pipeline.image_processor.preprocess(Image.fromarray(image), 64, 96).unsqueeze(2)
        expected = pack_latents(pipeline._encode_vae_image(tensor, None)[0, :, 0])
    (ours,) = stages.vae_encoder.encode([image])
    assert expected.std() > 0.1
    assert torch.allclose(ours, expected, atol=1e-5)


def test_images_of_all_sizes_are_encoded_together(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [pixels(64, 32), pixels(32, 64, 1), pixels(64, 32, 2), pixels(16, 16, 3), pixels(64, 32, 4)]
    alone = [stages.vae_encoder.encode([image])[0] for image in images]
    batches = []
    encode = stages.vae_encoder._encode_batch
    monkeypatch.setattr(stages.vae_encoder, "_encode_batch", lambda batch: batches.append(len(batch)) or encode(batch))
    for ours, solo in zip(stages.vae_encoder.encode(images), alone, strict=True):
        assert torch.allclose(ours, solo, atol=1e-5)
    assert sorted(batches) == [1, 1, 3]
    assert stages.vae_encoder.encode([]) == []


def test_bf16_is_near(stages: Stages) -> None:
    half = load_vae_encoder(stages.checkpoint, CPU, torch.bfloat16)
    assert half.report.bytes * 2 == stages.vae_encoder.report.bytes
    exact, rounded = (encoder.encode([pixels(64, 32)])[0] for encoder in (stages.vae_encoder, half))
    assert (exact - rounded).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("size", [(8, 16), (16, 24), (17, 16)])
def test_sizes_that_are_no_patches_are_refused(stages: Stages, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="SIZES"):
        stages.vae_encoder.encode([pixels(*size)])


def prompt(stages: Stages, text: str, images: list[np.ndarray]) -> list[int]:
    tokens = [image.shape[0] * image.shape[1] // 28**2 for image in images]
    return stages.tokenizer.encode(text, image_tokens=tokens)


def test_rows_with_and_without_images_in_one_batch(stages: Stages) -> None:
    one, two = [pixels(84, 56)], [pixels(28, 112, 1), pixels(56, 56, 2)]
    rows = [
        (prompt(stages, "make it snow", one), one),
        (stages.tokenizer.encode("a kite"), []),
        (prompt(stages, "x", two), two),
    ]
    together = stages.text_encoder.encode([ids for ids, _ in rows], [images for _, images in rows])
    for (ids, images), ours in zip(rows, together, strict=True):
        (alone,) = stages.text_encoder.encode([ids], [images])
        assert torch.allclose(ours, alone, atol=1e-5)
        assert len(ours) == len(ids) - (EDIT_DROP if images else 34)
    changed = stages.text_encoder.encode([ids for ids, _ in rows], [[pixels(84, 56, 9)], [], two])
    assert not torch.equal(changed[0], together[0])
    assert torch.equal(changed[1], together[1])
    assert torch.equal(changed[2], together[2])


def test_equal_images_are_encoded_once(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's two branches show the same images."""
    images = [pixels(84, 56), pixels(56, 56, 1)]
    seen = []
    tower = stages.text_encoder._vision
    assert tower is not None
    encode = tower.encode
    monkeypatch.setattr(tower, "encode", lambda image: seen.append(image.shape) or encode(image))
    copies = [image.copy() for image in images]
    stages.text_encoder.encode([prompt(stages, "a", images), prompt(stages, "b", copies)], [images, copies])
    assert len(seen) == 2


def test_images_that_are_not_in_the_prompt(stages: Stages) -> None:
    image = pixels(56, 56)
    ids = prompt(stages, "x", [image])
    plain = stages.tokenizer.encode("x")
    assert torch.equal(*(stages.text_encoder.encode([plain], [given])[0] for given in ([], [image])))
    for images in ([], [image, image], [pixels(84, 56)]):
        with pytest.raises(InvalidRequest, match=r"INPUT_IDS = .*images"):
            stages.text_encoder.encode([ids], [images])
    with pytest.raises(InvalidRequest, match="SIZES"):
        stages.text_encoder.encode([ids], [[pixels(60, 60)]])
    with pytest.raises(InvalidRequest, match="must have 65 to"):
        stages.text_encoder.encode([[stages.text_encoder._image_token] * 4], [[image]])


def test_positions() -> None:
    ids = [1, 7, 7, 7, 7, 7, 7, 2, 3]
    (run,) = runs = image_runs(ids, 7)
    assert (run.start, run.stop) == (1, 7)
    positions = multimodal_positions(len(ids), runs, [(3, 2)])  # 3 wide, 2 high
    assert positions.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]
    assert torch.equal(multimodal_positions(4, [], []), torch.arange(4).expand(3, -1))


def test_prompts_of_edits(stages: Stages, tiny_edit_checkpoint: Path) -> None:
    tokenizer = stages.tokenizer
    text = tokenizer._tokenizer.decode(tokenizer.encode("make it snow", image_tokens=[2, 1]), skip_special_tokens=False)
    assert (
        "user\nPicture 1: <|vision_start|><|image_pad|><|image_pad|><|vision_end|>Picture 2: <|vision_start|>" in text
    )
    assert text.endswith("<|image_pad|><|vision_end|>make it snow<|im_end|>\n<|im_start|>assistant\n")
    single = Stages(tiny_edit_checkpoint).tokenizer
    text = single._tokenizer.decode(single.encode("make it snow", image_tokens=[1]), skip_special_tokens=False)
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>make it snow<|im_end|>" in text
    words = "snow " * (tokenizer.max_tokens + 1)
    with pytest.raises(InvalidRequest, match="must not exceed"):
        tokenizer.encode(words, image_tokens=[1])


def test_a_text_to_image_checkpoint_leaves_the_vision_tower_in_the_file(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    assert checkpoint.editing is None
    assert load_text_encoder(checkpoint, CPU, torch.float32)._vision is None
    with pytest.raises(CheckpointError, match="cannot edit images; must be QwenImageEditPipeline or"):
        ImagePreparer(checkpoint)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("processor/preprocessor_config.json", None, "missing file"),
        ("processor/preprocessor_config.json", {"patch_size": 16}, "patch_size = 16: must be 14"),
        ("processor/preprocessor_config.json", {"image_std": [1, 2]}, "image_std = .*must have 3 entries"),
        ("processor/preprocessor_config.json", {"size": {"shortest_edge": 0}}, "min_pixels = 0"),
        ("text_encoder/config.json", {"image_token_id": None}, "image_token_id"),
        ("text_encoder/config.json", {"image_token_id": 3}, "must be image_token_id = 3"),
        ("text_encoder/config.json", {"vision_config": None}, "vision_config = None"),
    ],
)
def test_a_checkpoint_that_cannot_show_images_is_refused(
    tiny_edit_checkpoint: Path, tmp_path: Path, file: str, change: dict | None, said: str
) -> None:
    copy = shutil.copytree(tiny_edit_checkpoint, tmp_path / "checkpoint")
    if change is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | change))
    with pytest.raises(CheckpointError, match=said):
        PromptTokenizer(open_checkpoint(copy))


@pytest.mark.parametrize(
    ("preset", "family", "most", "zero_cond_t"),
    [
        ("tiny-edit", "QwenImageEditPipeline", 1, False),
        ("tiny-edit-2509", "QwenImageEditPlusPipeline", 3, False),
        ("tiny-edit-2511", "QwenImageEditPlusPipeline", 3, True),
    ],
)
def test_the_command_that_makes_them(preset: str, family: str, most: int, zero_cond_t: bool, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(make_checkpoint)
    done = CliRunner().invoke(app, [preset, str(tmp_path / "made")])
    assert done.exit_code == 0, done.output
    checkpoint = open_checkpoint(tmp_path / "made")
    assert checkpoint.editing is not None
    assert (checkpoint.family, checkpoint.editing.max_references) == (family, most)
    assert checkpoint.transformer_config["zero_cond_t"] is zero_cond_t
    assert checkpoint.limits(2048 * 2048).max_references == most
