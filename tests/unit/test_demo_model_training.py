"""The training command, whole, at its smallest: it resumes, and what it leaves is a checkpoint that makes pictures."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from click.testing import Result
from edit_tools import edit_pipeline
from oracle import reference_pipeline
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from ditpack.demo_model.judge import __main__ as judging
from ditpack.demo_model.judge.network import JudgeError, load_judge
from ditpack.demo_model.painter import Job, Painter
from ditpack.demo_model.scenes import SceneMaker
from ditpack.demo_model.shapes import shape_icons
from ditpack.demo_model.train import __main__ as training
from ditpack.demo_model.train import names as naming
from ditpack.demo_model.train.loop import Loop
from ditpack.demo_model.words import spoken, with_article
from ditpack.models.checkpoint import open_checkpoint

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"


SMOKE = ("--preset", "smoke", "--minutes", "0.06", "--device", "cpu")


def run(main: Callable[..., None], *arguments: object) -> Result:
    """A command in this process, which has imported by now what takes a new one seconds."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves, run up to the VAE at first, and then from the states that it kept."""
    out = tmp_path_factory.mktemp("train") / "out"
    command = [sys.executable, "-m", "ditpack.demo_model.train", str(out), *SMOKE, "--until", "vae"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not (out / "dit.pt").exists()
    rest = run(training.main, out, *SMOKE, "--resume")
    assert rest.exit_code == 0, rest.output
    assert "vae: done before" in rest.output
    return out


def test_it_leaves_states_sheets_a_judge_and_a_checkpoint(trained: Path) -> None:
    for name in ("judge", "vae", "dit"):
        assert Image.open(trained / f"{name}.png").width > 100
        assert torch.load(trained / f"{name}.pt", weights_only=True)["done"]
    log = (trained / "train.log").read_text()
    assert "dB on held-out scenes" in log
    facts = json.loads((trained / "facts.json").read_text())
    card = (trained / "checkpoint" / "MODEL_CARD.md").read_text()
    assert "{" not in card, "a blank that nobody filled"
    assert f"{facts['psnr']} dB" in card
    notices = (trained / "checkpoint" / "THIRD_PARTY_NOTICES.md").read_text()
    assert "Copyright (c) Microsoft Corporation." in notices
    assert "Copyright 2013 Google, Inc." in notices


def test_a_folder_in_use_is_left_alone(trained: Path) -> None:
    refused = run(training.main, trained, *SMOKE)
    assert refused.exit_code == 2
    assert "--resume goes on" in refused.output


class Counter:
    """A stage that counts, and is interrupted at ``limit`` steps."""

    name = "counter"

    def __init__(self, limit: int = 10**9) -> None:
        self.count, self.limit, self.finished = 0, limit, False

    def step(self, progress: float) -> None:
        assert 0 <= progress <= 1
        self.count += 1
        time.sleep(0.001)
        if self.count == self.limit:
            raise KeyboardInterrupt

    def figures(self) -> dict[str, float]:
        return {"count": self.count}

    def sheet(self, file: Path) -> None:
        file.touch()

    def finish(self) -> None:
        self.finished = True

    def state(self, done: bool) -> dict[str, Any]:
        assert done == self.finished
        return {"count": self.count}

    def load(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_an_interrupted_stage_goes_on_from_its_last_save(tmp_path: Path) -> None:
    loop = Loop(tmp_path, CPU, Console(file=io.StringIO()), save_minutes=0.01 / 60)
    with pytest.raises(KeyboardInterrupt):
        loop.run(Counter(limit=100), minutes=1)
    stored = torch.load(tmp_path / "counter.pt", weights_only=True)
    assert 0 < stored["steps"] < 100
    assert not stored["done"]
    resumed = Counter()
    loop.run(resumed, minutes=(stored["seconds"] + 0.05) / 60)
    assert stored["stage"]["count"] < resumed.count < stored["stage"]["count"] + 51  # 0.05 s more, at 1 ms a step
    assert resumed.finished
    again = Counter()
    loop.run(again, minutes=1)
    assert (again.count, again.finished) == (resumed.count, False), "what is done is not done again"


def test_ditpack_paints_and_edits_with_it(trained: Path) -> None:
    checkpoint = open_checkpoint(str(trained / "checkpoint"))
    assert checkpoint.editing is not None
    assert checkpoint.editing.max_references == 3
    painter = Painter(trained / "checkpoint", CPU)
    picture = np.zeros((64, 96, 3), dtype=np.uint8)
    jobs = [
        Job("a red circle", (96, 64), 1),
        Job("make it two", (64, 64), 2, (picture,)),
        Job("combine", (64, 64), 3, (picture,) * 3),
    ]
    painted = next(painter.paint(jobs, steps=2))
    assert [image.shape for image in painted] == [(64, 96, 3), (64, 64, 3), (64, 64, 3)]


def test_diffusers_paints_and_edits_with_it(trained: Path) -> None:
    """The same picture from text, and an edit by the pipeline class that the checkpoint names."""
    pipeline = reference_pipeline(trained / "checkpoint")
    theirs = pipeline(
        "a red circle",
        negative_prompt=" ",
        true_cfg_scale=3.0,
        width=96,
        height=64,
        num_inference_steps=3,
        generator=torch.Generator("cpu").manual_seed(1),
    ).images[0]
    ours = next(Painter(trained / "checkpoint", CPU).paint([Job("a red circle", (96, 64), 1)], steps=3))[0]
    assert np.abs(ours.astype(int) - np.asarray(theirs)).max() <= 1
    edited = edit_pipeline(trained / "checkpoint")(
        image=Image.new("RGB", (64, 64)), prompt="make it two", width=64, height=64, num_inference_steps=2,
        true_cfg_scale=1.0,
    )  # fmt: skip
    assert edited.images[0].size == (64, 64)


def test_names_are_taught_to_what_it_leaves(trained: Path, tmp_path: Path) -> None:
    before = (trained / "checkpoint" / "transformer" / WEIGHTS).read_bytes()
    arguments = (trained, tmp_path / "named", "--preset", "smoke", "--minutes", "0.02")
    done = run(naming.main, *arguments)
    assert done.exit_code == 0, done.output
    named = tmp_path / "named" / "checkpoint"
    card = (named / "MODEL_CARD.md").read_text()
    assert "ditpack.demo_model.train.names TRAINED OUT" in card
    assert "{" not in card
    assert json.loads((tmp_path / "named" / "facts.json").read_text())["names"]
    assert (named / "transformer" / WEIGHTS).read_bytes() != before
    assert next(Painter(named, CPU).paint([Job("a red circle", (96, 64), 1)], steps=2))[0].shape == (64, 96, 3)
    refused = run(naming.main, *arguments)
    assert refused.exit_code == 2
    assert "--resume goes on" in refused.output
    nothing = run(naming.main, tmp_path, tmp_path / "other", "--preset", "smoke")
    assert nothing.exit_code == 1
    assert "which a training leaves" in nothing.output


def test_the_judge_judges(trained: Path) -> None:
    """True scenes, wrong ones, and the command's table; the smoke judge is too young to be right about much."""
    judge, accuracy = load_judge(trained / "judge.safetensors", CPU)
    assert set(accuracy) == {"name", "name_top5", "count", "style"}
    done = run(
        judging.main,
        *(trained / "checkpoint", "--judge", trained / "judge.safetensors", "--shapes"),
        *("--prompts", "4", "--edits", "1", "--steps", "2", "--device", "cpu", "--out", trained / "score.json"),
    )
    assert done.exit_code == 0, done.output
    assert "edit combine" in done.output
    written = json.loads((trained / "score.json").read_text())
    figures = written["figures"]
    assert figures["true scenes"]["background"] == 1.0
    column = str(trained / "checkpoint")
    assert set(figures[column]) == set(figures["true scenes"])
    mistaken = written["mistaken"][column]
    assert mistaken, "a model of seconds paints all it is asked for"
    assert figures[column]["every name"] == pytest.approx(1 - len(mistaken) / len(judge.names), abs=1e-4)
    assert set(mistaken) <= {with_article(spoken(name)) for name in judge.names}
    assert judge.names == tuple(SceneMaker(shape_icons()).names)
    with pytest.raises(JudgeError, match="is not a judge"):
        load_judge(trained / "score.json", CPU)
