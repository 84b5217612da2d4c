"""Verdicts: what of a scene a picture shows, and shares of them over held-out prompts and edits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ditpack.demo_model.captions import Captions
from ditpack.demo_model.edits import KINDS, EditMaker
from ditpack.demo_model.judge.checks import Pixels, background_of, place_of, regions
from ditpack.demo_model.judge.network import Judge, JudgeError
from ditpack.demo_model.scenes import Random, Scene, SceneMaker, Size, choice
from ditpack.demo_model.words import spoken, synonyms, with_article

TOP = 5
# Of pictures: what the bars are about, then more. Each is a share of the prompts that it applies to.
METRICS = ("background", "count", "icon", "place", "style", "pair", "synonym", "everything")
_ORDERED = (" on the left and ", " above ", " below ", " on top of ")  # captions that say which of two is where
SIZES: tuple[Size, ...] = ((128, 128), (128, 128), (160, 96), (96, 160), (192, 64), (64, 192), (112, 144), (96, 96))
EDIT_SIZES: tuple[Size, ...] = ((128, 128), (128, 128), (160, 96), (96, 160))


@dataclass(frozen=True, slots=True)
class Task:
    """A picture to make and to judge: it must show ``scene``. ``kind``: "prompt", "synonym", "name" or an edit's."""

    kind: str
    text: str
    scene: Scene
    sources: tuple[Scene, ...] = ()


def prompts(scenes: SceneMaker, count: int, seed: int = 100) -> list[Task]:
    """Held-out scenes under their icons' own names."""
    random: Random = np.random.default_rng(seed)
    captions = Captions(scenes.icons, synonym_share=0)
    tasks = []
    for index in range(count):
        scene = scenes.draw(random, SIZES[index % len(SIZES)], held_out=True)
        tasks.append(Task("prompt", captions.caption(random, scene), scene))
    return tasks


def synonym_prompts(scenes: SceneMaker, count: int, seed: int = 101) -> list[Task]:
    """Single icons under other words than their names."""
    random: Random = np.random.default_rng(seed)
    known = [index for index, icon in enumerate(scenes.icons) if icon.name in synonyms()]
    tasks = []
    for _ in range(count if known else 0):
        icon = int(choice(random, known))
        words = choice(random, synonyms()[scenes.icons[icon].name])
        tasks.append(Task("synonym", with_article(words), Scene((128, 128), "centre", (icon,), "white")))
    return tasks


def name_prompts(scenes: SceneMaker) -> list[Task]:
    """Every name once, alone."""
    first = {icon.name: index for index, icon in reversed(list(enumerate(scenes.icons)))}
    return [
        Task("name", with_article(spoken(name)), Scene((128, 128), "centre", (first[name],), "white"))
        for name in scenes.names
    ]


def edits(scenes: SceneMaker, count: int, references: int = 2, seed: int = 102) -> list[Task]:
    """``count`` held-out edits of each kind; pictures are combined from ``references``, 2 or 3."""
    random: Random = np.random.default_rng(seed)
    maker = EditMaker(scenes, Captions(scenes.icons, synonym_share=0))
    tasks = []
    for kind in KINDS:
        for index in range(count):
            edit = maker.draw(random, kind, EDIT_SIZES[index % len(EDIT_SIZES)], references=references, held_out=True)
            tasks.append(Task(kind, edit.instruction, edit.target, edit.sources))
    return tasks


class Eyes:
    """Looks at pictures with a judge. ``scenes`` tells the names of icons."""

    def __init__(self, judge: Judge, scenes: SceneMaker) -> None:
        """Raises JudgeError when there are icons that the judge does not know."""
        unknown = sorted(set(scenes.names) - set(judge.names))
        if unknown:
            raise JudgeError(f"the judge was not trained on {len(unknown)} of the icons, such as {unknown[0]}")
        self._judge, self._scenes = judge, scenes
        self._device = next(judge.parameters()).device
        self._index = {name: place for place, name in enumerate(judge.names)}

    def verdict(self, task: Task, picture: Pixels) -> dict[str, bool]:
        """The metrics that apply to ``task``, and whether ``picture`` meets them."""
        scene = task.scene
        whole, count, style = self._look(picture)
        parts = regions(picture, scene.layout, scene.count) if scene.layout in ("row", "column") else []
        seen = [self._look(part)[0] for part in parts]
        names = [self._index[self._scenes.icons[icon].name] for icon in scene.icons]
        if scene.alike:
            shown = names[0] in _top(whole)
        else:
            shown = all(name in _top(logits) for name, logits in zip(names, seen, strict=True))
        verdict = {"background": background_of(picture) == scene.background, "count": count == scene.count}
        if scene.count == 1:
            verdict["icon"] = shown
            if scene.layout != "centre" or task.kind != "prompt":
                verdict["place"] = place_of(picture) == scene.layout
        elif not scene.alike:
            verdict["pair"] = shown
            if scene.count == 2 and any(words in task.text for words in _ORDERED):
                straight = seen[0][names[0]] + seen[1][names[1]]
                verdict["place"] = bool(straight > seen[0][names[1]] + seen[1][names[0]])
        if task.text.endswith(" style"):
            verdict["style"] = style == self._scenes.style(scene)
        if task.kind == "synonym":
            return {"synonym": shown}
        verdict["everything"] = shown and all(verdict.values())
        return verdict

    def recognises(self, task: Task, picture: Pixels) -> bool:
        """Whether the first guess at ``picture`` is the name of the one icon of ``task``."""
        guess = int(self._look(picture)[0].argmax())
        return guess == self._index[self._scenes.icons[task.scene.icons[0]].name]

    @torch.inference_mode()
    def _look(self, picture: Pixels) -> tuple[torch.Tensor, int, str]:
        """Logits of the names, the count and the style."""
        pixels = torch.from_numpy(np.ascontiguousarray(picture)).to(self._device)
        name, count, style = self._judge(pixels.permute(2, 0, 1)[None].float() / 127.5 - 1)
        return name[0].cpu(), int(count[0].argmax()) + 1, self._judge.styles[int(style[0].argmax())]


def score(eyes: Eyes, pairs: Iterable[tuple[Task, Pixels]]) -> dict[str, float]:
    """The share of each metric over prompts; for edits, under their kind, the share that shows the whole target."""
    found: dict[str, list[bool]] = {}
    for task, picture in pairs:
        verdict = eyes.verdict(task, picture)
        metrics: Mapping[str, bool] = {task.kind: verdict["everything"]} if task.kind in KINDS else verdict
        for metric, met in metrics.items():
            found.setdefault(f"edit {metric}" if task.kind in KINDS else metric, []).append(met)
    order: Sequence[str] = (*METRICS, *(f"edit {kind}" for kind in KINDS))
    return {metric: round(float(np.mean(found[metric])), 4) for metric in order if metric in found}


def _top(logits: torch.Tensor) -> list[int]:
    return [int(place) for place in logits.topk(min(TOP, len(logits))).indices]
