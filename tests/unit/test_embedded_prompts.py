"""The embedded model paints what easy prompts say, and edits as it is told, by the judge that comes with the tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ditpack.demo_model.icons import STYLES, Icon
from ditpack.demo_model.judge.__main__ import BARS, EDIT_BAR
from ditpack.demo_model.judge.checks import Pixels
from ditpack.demo_model.judge.network import CHECKOUTS_JUDGE, Judge, load_judge
from ditpack.demo_model.judge.score import Eyes, Task, score
from ditpack.demo_model.painter import Job, Painter
from ditpack.demo_model.scenes import Scene, SceneMaker, Size

CPU = torch.device("cpu")
STEPS = 12
SQUARE, WIDE, TALL = (128, 128), (160, 96), (96, 160)
# Text, size, layout, background, names.
APPLE = ("a red apple on a blue background, glossy style", SQUARE, "centre", "blue", "red-apple")
PIZZA = ("a pizza, glossy style", SQUARE, "centre", "white", "pizza")
HEART = ("a red heart on the left", WIDE, "left", "white", "red-heart")
SUN_ABOVE_CLOUD = ("a sun above a cloud", TALL, "column", "white", "sun", "cloud")
PROMPTS = (
    APPLE,
    ("a red heart on a yellow background, flat style", SQUARE, "centre", "yellow", "red-heart"),
    ("a sun on a black background", SQUARE, "centre", "black", "sun"),
    ("a cactus on a pink background, flat style", SQUARE, "centre", "pink", "cactus"),
    PIZZA,
    ("a watermelon on a teal background", SQUARE, "centre", "teal", "watermelon"),
    HEART,
    ("a star at the bottom on a blue background", TALL, "bottom", "blue", "star"),
    ("two pink hearts", WIDE, "row", "white", "pink-heart", "pink-heart"),
    ("two red apples on a green background", WIDE, "row", "green", "red-apple", "red-apple"),
    ("four eggs on a brown background", SQUARE, "grid", "brown", *["egg"] * 4),
    SUN_ABOVE_CLOUD,
)
# Kind, what is edited, then as above; the result has the size of what is edited last.
EDITS = (
    ("background", [APPLE], "change the background to green", "centre", "green", "red-apple"),
    ("add", [HEART], "add a star on the right", "row", "white", "red-heart", "star"),
    ("remove", [SUN_ABOVE_CLOUD], "remove the cloud", "top", "white", "sun"),
    ("double", [PIZZA], "make it two", "row", "white", "pizza", "pizza"),
    ("swap", [SUN_ABOVE_CLOUD], "swap top and bottom", "column", "white", "cloud", "sun"),
    ("combine", [APPLE, PIZZA], "combine both pictures", "row", "blue", "red-apple", "pizza"),
)


class Verdicts:
    """Tasks about the judge's own names, and shares of pictures that meet them."""

    def __init__(self, judge: Judge) -> None:
        self._icons = [Icon(name, style, "") for style in STYLES for name in judge.names]
        self.eyes = Eyes(judge, SceneMaker(self._icons))

    def task(self, text: str, size: Size, layout: str, background: str, *names: str, kind: str = "prompt") -> Task:
        style = "glossy" if text.endswith("glossy style") else "flat"
        places = {icon.name: index for index, icon in enumerate(self._icons) if icon.style == style}
        return Task(kind, text, Scene(size, layout, tuple(places[name] for name in names), background))


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return Verdicts(load_judge(CHECKOUTS_JUDGE, CPU)[0])


@pytest.fixture(scope="module")
def painter(embedded_checkpoint: Path) -> Painter:
    return Painter(embedded_checkpoint, CPU)


@pytest.fixture(scope="module")
def painted(painter: Painter) -> list[Pixels]:
    jobs = [Job(text, size, seed) for seed, (text, size, *_) in enumerate(PROMPTS)]
    return next(painter.paint(jobs, STEPS))


def test_prompts_are_followed(verdicts: Verdicts, painted: list[Pixels]) -> None:
    tasks = [verdicts.task(*prompt) for prompt in PROMPTS]
    found = score(verdicts.eyes, zip(tasks, painted, strict=True))
    assert {metric: share for metric, share in found.items() if share < BARS.get(metric, 0)} == {}, found
    mistaken = score(verdicts.eyes, zip(tasks, painted[1:] + painted[:1], strict=True))
    assert mistaken["icon"] < 0.5, "a judge that takes one thing for another would prove nothing"


def test_edits_are_followed(verdicts: Verdicts, painter: Painter, painted: list[Pixels]) -> None:
    pictures = dict(zip(PROMPTS, painted, strict=True))
    jobs, tasks = [], []
    for seed, (kind, sources, text, *shows) in enumerate(EDITS):
        size = sources[-1][1]
        jobs.append(Job(text, size, seed, tuple(pictures[source] for source in sources)))
        tasks.append(verdicts.task(text, size, *shows, kind=kind))
    found = score(verdicts.eyes, zip(tasks, next(painter.paint(jobs, STEPS)), strict=True))
    assert np.mean(list(found.values())) >= EDIT_BAR, found
