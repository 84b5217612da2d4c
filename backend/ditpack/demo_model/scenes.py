"""Scenes: one to four icons on a plain background. What is in one is known exactly, so it can be told and judged."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ditpack.demo_model.icons import Icon

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (20, 20, 24),
    "red": (222, 58, 54),
    "orange": (245, 146, 40),
    "yellow": (252, 214, 60),
    "green": (70, 168, 88),
    "blue": (56, 116, 220),
    "purple": (132, 80, 190),
    "pink": (246, 150, 190),
    "brown": (128, 84, 56),
    "gray": (150, 152, 158),
    "teal": (40, 160, 160),
}
PLACES = ("centre", "left", "right", "top", "bottom")  # of a single icon
_WIDE = 1.3  # from this aspect on, a row fits better than a column
_HELD_OUT = 20  # one scene in so many is never trained on

Size = tuple[int, int]  # (width, height) in pixels
# A generator seeded by whoever needs the same scenes again.
Random = np.random.Generator


@dataclass(frozen=True, slots=True)
class Item:
    """An icon in a scene: its index, its centre and its side in pixels."""

    icon: int
    x: float
    y: float
    side: float


@dataclass(frozen=True, slots=True)
class Scene:
    """``icons`` in the order of ``layout``: a place of ``PLACES`` for one; "row", left to right, "column", top to
    bottom, or "grid", row by row, for several. ``scale``: how much of its cell an icon fills.
    """

    size: Size
    layout: str
    icons: tuple[int, ...]
    background: str
    scale: float = 0.9

    @property
    def count(self) -> int:
        return len(self.icons)

    @property
    def alike(self) -> bool:
        """Whether it shows copies of one icon (or one icon)."""
        return len(set(self.icons)) == 1

    def items(self) -> list[Item]:
        width, height = self.size
        return [
            Item(icon, x * width, y * height, self.scale * min(w * width, h * height))
            for icon, (x, y, w, h) in zip(self.icons, cells(self.layout, self.count), strict=True)
        ]


Cell = tuple[float, float, float, float]  # centre x, centre y, width, height, as fractions of the picture


def cells(layout: str, count: int) -> list[Cell]:
    """Where the icons of a layout are. A single one at a side is where it would be in a pair."""
    if layout == "row":
        return [((k + 0.5) / count, 0.5, 1 / count, 1.0) for k in range(count)]
    if layout == "column":
        return [(0.5, (k + 0.5) / count, 1.0, 1 / count) for k in range(count)]
    if layout == "grid":
        corners = [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)]
        if count == 3:
            corners = [(0.5, 0.25), *corners[2:]]
        return [(x, y, 0.5, 0.5) for x, y in corners[:count]]
    if layout == "centre":
        return [(0.5, 0.5, 1.0, 1.0)]
    x = {"left": 0.25, "right": 0.75}.get(layout, 0.5)
    y = {"top": 0.25, "bottom": 0.75}.get(layout, 0.5)
    return [(x, y, 1.0 if x == 0.5 else 0.5, 1.0 if y == 0.5 else 0.5)]


class SceneMaker:
    """Draws scenes from an icon set. Those held out are the same in every process, and never mixed with the others."""

    def __init__(self, icons: Sequence[Icon]) -> None:
        self.icons = icons
        self.by_style: dict[str, list[int]] = {}
        for index, icon in enumerate(icons):
            self.by_style.setdefault(icon.style, []).append(index)
        self.names = sorted({icon.name for icon in icons})

    def style(self, scene: Scene) -> str:
        return self.icons[scene.icons[0]].style

    def key(self, scene: Scene) -> str:
        """What a scene shows, without its size: what makes it the same scene as another."""
        names = ",".join(self.icons[icon].name for icon in scene.icons)
        return f"{scene.layout}|{names}|{scene.background}|{self.style(scene)}"

    def held_out(self, scene: Scene) -> bool:
        return zlib.crc32(self.key(scene).encode()) % _HELD_OUT == 0

    def pick(self, random: Random, different: int = 1) -> tuple[int, ...]:
        """Different icons of one style."""
        styles = sorted(self.by_style)
        pool = self.by_style[styles[random.integers(len(styles))]]
        return tuple(pool[place] for place in random.choice(len(pool), different, replace=False))

    def background(self, random: Random) -> str:
        """White half of the time, as most people leave it."""
        return "white" if random.random() < 0.45 else choice(random, tuple(COLOURS))

    def draw(self, random: Random, size: Size, held_out: bool = False) -> Scene:
        """A scene of ``size``, of the held-out ones or of the others."""
        while True:
            scene = self._draw(random, size)
            if self.held_out(scene) == held_out:
                return scene

    def _draw(self, random: Random, size: Size) -> Scene:
        kind = random.random()
        small = max(size) < 96
        if kind < 0.55 or small:
            layout, icons = self._single(random, size), self.pick(random)
        elif kind < 0.8:
            layout, icons = pair_layout(random, size), self.pick(random, 2)
        elif kind < 0.84 and size[0] >= 128:
            layout, icons = "row", self.pick(random, 3)
        else:
            count = int(random.integers(2, 5))
            layout, icons = count_layout(random, size, count), self.pick(random) * count
        return Scene(size, layout, icons, self.background(random), draw_scale(random))

    def _single(self, random: Random, size: Size) -> str:
        aspect = size[0] / size[1]
        if aspect >= _WIDE:
            return choice(random, ("left", "right")) if random.random() < 0.4 else "centre"
        if aspect <= 1 / _WIDE:
            return choice(random, ("top", "bottom")) if random.random() < 0.4 else "centre"
        return choice(random, PLACES[1:]) if random.random() < 0.2 and max(size) >= 96 else "centre"


def draw_scale(random: Random) -> float:
    return float(random.uniform(0.8, 0.94))


def pair_layout(random: Random, size: Size) -> str:
    """How two icons are best laid out."""
    aspect = size[0] / size[1]
    if aspect >= _WIDE:
        return "row"
    if aspect <= 1 / _WIDE:
        return "column"
    return "row" if random.random() < 0.6 else "column"


def plain_layout(size: Size) -> str:
    """How two icons are laid out when nobody says how: above each other in a tall picture only."""
    return "column" if size[0] / size[1] <= 1 / _WIDE else "row"


def count_layout(random: Random, size: Size, count: int) -> str:
    """How copies are laid out: along a long picture, in a grid in a squarish one."""
    if count == 2 or not 1 / _WIDE < size[0] / size[1] < _WIDE:
        return pair_layout(random, size)
    return "grid"


def choice(random: Random, options: Sequence[Any]) -> Any:
    return options[random.integers(len(options))]
