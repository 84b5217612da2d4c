"""The recipes of docs/ensembles.md, followed to the letter, then served."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from mistakes import swap
from PIL import Image
from server_tools import Caller, Pixels, assert_same_picture, info, parameter, serving
from transformers import Qwen2_5_VLForConditionalGeneration

from ditpack.models.tiny import write_tiny_checkpoint
from ditpack.tritonserver.launch import TritonServer
from ditpack.tritonserver.launch.repository import find_repository
from ditpack_client import Client, GenerationError

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
LEVELS = 2  # of 255 from diffusers
KITE: dict[str, Any] = {"PROMPT": "a red kite", "WIDTH": 96, "HEIGHT": 64, "NUM_INFERENCE_STEPS": 6, "SEED": 7}


def recipes() -> dict[str, str]:
    """The shell blocks of docs/ensembles.md, by the heading above each."""
    found, name = {}, ""
    text = (ROOT / "docs" / "ensembles.md").read_text()
    for heading, block in re.findall(r"^## (.+?)$|^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if heading:
            name = heading
        else:
            found[name] = block
    return found


def follow(block: str, directory: Path, checkpoint: Path, other: Path) -> None:
    """Run a block's commands in ``directory``, all but serve; each ``ditpack check`` must find nothing at all."""
    commands = "\n".join(line for line in block.splitlines() if not line.startswith("ditpack serve"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DITPACK_CHECKPOINT": str(checkpoint)}
    script = commands.replace("/models/other", str(other)).replace("ditpack check", "ditpack check --strict")
    done = subprocess.run(
        ["sh", "-eu", "-c", script], cwd=directory, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recipes") / "other"
    write_tiny_checkpoint(directory, seed=1)
    return directory


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, other_checkpoint: Path) -> Path:
    """A fresh clone, as far as the recipes need one, in which all of them but the GPUs' were followed."""
    directory = tmp_path_factory.mktemp("clone")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(find_repository(None), directory / "model_repository", ignore=ignore)
    shutil.copytree(ROOT / "examples", directory / "examples", ignore=ignore)
    blocks = recipes()
    assert list(blocks) == [
        "After every edit",
        "A step between decoding and encoding",
        "Another VAE or text encoder",
        "Two checkpoints side by side",
        "An engine on each of two GPUs",
    ]
    for name, block in blocks.items():
        if "GPU" not in name:
            follow(block, directory, tiny_checkpoint, other_checkpoint)
    return directory


@pytest.fixture(scope="module")
def served(workplace: Path, tiny_checkpoint: Path) -> Iterator[TritonServer]:
    """With one ensemble more, ``strict``, whose filter withholds everything."""
    repository = workplace / "my_repository"
    shutil.copytree(repository / "image_filter", repository / "image_filter_strict")
    shutil.copytree(repository / "qwen_image", repository / "strict")
    config = repository / "image_filter_strict" / "config.pbtxt"
    config.write_text(re.sub(*parameter("darkest", "256"), config.read_text()))
    config = repository / "strict" / "config.pbtxt"
    config.write_text(swap('model_name: "image_filter"', 'model_name: "image_filter_strict"')(config.read_text()))
    with serving(tiny_checkpoint, workplace / "log", repository) as server:
        yield server


@pytest.fixture
def recipe_caller(served: TritonServer) -> Iterator[Caller]:
    caller = Caller(served, "grpc")
    yield caller
    caller.close()


def painted(pipeline: QwenImagePipeline) -> Pixels:
    pipeline.set_progress_bar_config(disable=True)
    return np.asarray(
        pipeline(
            prompt=KITE["PROMPT"],
            negative_prompt=" ",
            true_cfg_scale=4.0,
            width=KITE["WIDTH"],
            height=KITE["HEIGHT"],
            num_inference_steps=KITE["NUM_INFERENCE_STEPS"],
            generator=torch.Generator("cpu").manual_seed(KITE["SEED"]),
        ).images[0]
    )


def picture(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.fixture(scope="module")
def swapped(tiny_checkpoint: Path, other_checkpoint: Path) -> Pixels:
    """By diffusers: one checkpoint's transformer with the other's text encoder and VAE."""
    fp32 = torch.float32
    vae = AutoencoderKLQwenImage.from_pretrained(other_checkpoint / "vae", dtype=fp32)
    encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(other_checkpoint / "text_encoder", dtype=fp32)
    return painted(QwenImagePipeline.from_pretrained(tiny_checkpoint, vae=vae, text_encoder=encoder, dtype=fp32))


def test_swapped_parts_and_a_filter_that_lets_pass(recipe_caller: Caller, swapped: Pixels) -> None:
    answer = recipe_caller.infer(KITE)
    assert_same_picture(picture(answer["IMAGE"].item()), swapped, LEVELS)
    assert answer["PIXELS"].shape == (0, 0, 3)
    assert info(answer)["finish_reason"] == "stop"
    assert info(answer)["decode_ms"] > 0
    raw = recipe_caller.infer({**KITE, "OUTPUT_FORMAT": "raw"})
    assert_same_picture(raw["PIXELS"], swapped, LEVELS)
    assert raw["IMAGE"].item() == b""
    assert info(recipe_caller.infer(KITE, outputs=["INFO"]))["finish_reason"] == "stop"


def test_the_other_checkpoint_beside_it(recipe_caller: Caller, other_checkpoint: Path, swapped: Pixels) -> None:
    theirs = painted(QwenImagePipeline.from_pretrained(other_checkpoint, dtype=torch.float32))
    ours = picture(recipe_caller.infer(KITE, model="other")["IMAGE"].item())
    assert_same_picture(ours, theirs, LEVELS)
    assert np.abs(ours.astype(int) - swapped).max() > 20, "two checkpoints, one picture"


def test_a_withheld_picture(served: TritonServer, recipe_caller: Caller) -> None:
    for output_format in ("png", "raw"):
        answer = recipe_caller.infer({**KITE, "OUTPUT_FORMAT": output_format}, model="strict")
        assert answer["IMAGE"].item() == b""
        assert answer["PIXELS"].shape == (0, 0, 3)
        assert info(answer)["finish_reason"] == "too_dark"
        assert answer["SEED_USED"].item() == KITE["SEED"]
    with (
        Client(served.http_url, model="strict") as client,
        pytest.raises(GenerationError, match="withholds it: too_dark") as error,
    ):
        client.generate("a red kite", width=96, height=64, num_inference_steps=6)
    assert error.value.code == "WITHHELD"


def test_two_gpus_are_checked(tmp_path: Path, tiny_checkpoint: Path, other_checkpoint: Path) -> None:
    shutil.copytree(find_repository(None), tmp_path / "my_repository")
    block = recipes()["An engine on each of two GPUs"]
    follow(block, tmp_path, tiny_checkpoint, other_checkpoint)
    with pytest.raises(AssertionError, match="GPU 1 does not exist"):
        follow(block.replace("--gpus 2", "--gpus 1"), tmp_path, tiny_checkpoint, other_checkpoint)
