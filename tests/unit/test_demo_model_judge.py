"""The judge's verdicts, with a classifier that is always right: each metric fails for its own reason alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ditpack.demo_model.icons import rasterise
from ditpack.demo_model.judge import score as scoring
from ditpack.demo_model.judge.checks import Pixels, place_of
from ditpack.demo_model.judge.network import SIDE, Judge, JudgeError, letterbox
from ditpack.demo_model.judge.score import Eyes, Task, edits, prompts, score
from ditpack.demo_model.render import draw
from ditpack.demo_model.scenes import Scene, SceneMaker
from ditpack.demo_model.shapes import shape_icons

ICONS = shape_icons()
SCENES = SceneMaker(ICONS)
SPRITES = rasterise(ICONS, 64)
# The most common colour of each flat shape tells it; counts come from how many cells have something in them.
COLOURS = {
    "red-circle": (224, 32, 32), "blue-square": (32, 80, 224), "green-triangle": (32, 160, 64),
    "yellow-star": (240, 192, 0), "purple-heart": (128, 48, 192), "black-cross": (32, 32, 32),
}  # fmt: skip


class Clairvoyant(Judge):
    """Knows flat shapes by their colours."""

    def __init__(self) -> None:
        super().__init__(SCENES.names, ("flat", "glossy"), 8)
        self.told_count = 1

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pixels = (pictures[0].permute(1, 2, 0) + 1) * 127.5
        shares = [((pixels - torch.tensor(COLOURS[name])).abs().amax(2) < 20).float().mean() for name in self.names]
        count = torch.nn.functional.one_hot(torch.tensor([self.told_count - 1]), 4).float()
        return torch.stack(shares)[None], count, torch.tensor([[1.0, 0.0]])


def icon(name: str) -> int:
    return next(k for k, one in enumerate(ICONS) if (one.name, one.style) == (name, "flat"))


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Callable[[Task, Scene], dict[str, bool]]:
    """Of a task and of the scene that was painted in its place."""
    monkeypatch.setattr(scoring, "TOP", 1)
    judge = Clairvoyant()
    eyes = Eyes(judge, SCENES)

    def look(task: Task, painted: Scene) -> dict[str, bool]:
        judge.told_count = painted.count
        return eyes.verdict(task, draw(SPRITES, painted))

    return look


HEART = Scene((160, 96), "left", (icon("purple-heart"),), "pink")
PAIR = Scene((160, 96), "row", (icon("red-circle"), icon("blue-square")), "white")


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, set()),
        ({"background": "teal"}, {"background"}),
        ({"layout": "right"}, {"place"}),
        ({"icons": (icon("yellow-star"),)}, {"icon"}),
        ({"icons": (icon("purple-heart"),) * 2, "layout": "row"}, {"count", "place"}),
    ],
)
def test_a_single_icon(change: dict[str, Any], failed: set[str], verdict: Any) -> None:
    found = verdict(Task("prompt", "a purple heart on the left", HEART), dataclasses.replace(HEART, **change))
    assert set(found) == {"background", "count", "icon", "place", "everything"}
    assert {name for name, met in found.items() if not met} == failed | ({"everything"} if failed else set())


def test_two_icons_in_their_order(verdict: Any) -> None:
    ordered = Task("prompt", "a red circle on the left and a blue square on the right", PAIR)
    assert all(verdict(ordered, PAIR).values())
    swapped = verdict(ordered, dataclasses.replace(PAIR, icons=PAIR.icons[::-1]))
    assert not swapped["place"]
    assert not swapped["everything"]
    assert "place" not in verdict(dataclasses.replace(ordered, text="a red circle and a blue square"), PAIR)


def test_style_counts_where_it_is_said(verdict: Any) -> None:
    assert verdict(Task("prompt", "a purple heart on the left, flat style", HEART), HEART)["style"]
    assert "style" not in verdict(Task("prompt", "a purple heart on the left", HEART), HEART)


def test_shares(verdict: Any) -> None:
    """Three of four prompts on the right background; an edit is right or wrong as a whole."""
    judge = Clairvoyant()
    eyes = Eyes(judge, SCENES)
    task, edit = (
        Task("prompt", "a purple heart on the left", HEART),
        Task("background", "make it pink", HEART, (HEART,)),
    )
    right, wrong = draw(SPRITES, HEART), draw(SPRITES, dataclasses.replace(HEART, background="black"))
    pairs: list[tuple[Task, Pixels]] = [(task, right)] * 3 + [(task, wrong), (edit, right), (edit, wrong)]
    figures = score(eyes, pairs)
    assert figures["background"] == 0.75
    assert figures["place"] == 1.0
    assert figures["everything"] == 0.75
    assert figures["edit background"] == 0.5


def test_tasks_are_held_out_and_the_same_every_time() -> None:
    for tasks in (prompts(SCENES, 30), edits(SCENES, 3)):
        assert all(SCENES.held_out(task.scene) for task in tasks)
    assert prompts(SCENES, 5) == prompts(SCENES, 5)
    assert {task.kind for task in edits(SCENES, 2)} == {"background", "add", "remove", "double", "swap", "combine"}


def test_edits_combine_as_many_pictures_as_asked_for() -> None:
    for references in (2, 3):
        combined = [task for task in edits(SCENES, 3, references) if task.kind == "combine"]
        assert [len(task.sources) for task in combined] == [references] * 3


def test_icons_that_the_judge_does_not_know_are_refused() -> None:
    judge = Judge(SCENES.names[1:], ("flat", "glossy"), 8)
    with pytest.raises(JudgeError, match=f"not trained on 1 of the icons, such as {SCENES.names[0]}"):
        Eyes(judge, SCENES)


def test_an_empty_picture_is_nowhere() -> None:
    assert place_of(np.full((32, 48, 3), 200, dtype=np.uint8)) == "nowhere"


def test_the_letterbox_keeps_the_aspect_and_fills_with_the_background() -> None:
    picture = torch.full((1, 3, 32, 128), 0.5)
    picture[:, :, 8:24, 48:80] = -1
    seen = letterbox(picture)
    assert seen.shape == (1, 3, SIDE, SIDE)
    dark = (seen[0, 0] < 0).nonzero()
    height, width = (dark.max(0).values - dark.min(0).values + 1).tolist()
    assert (height, width) == (8, 16)
    assert seen[0, :, 0, 0].tolist() == [0.5] * 3
