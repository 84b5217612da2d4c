"""Edit pairs that the composer can make exactly: one to three pictures, an instruction, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ditpack.demo_model.captions import Captions
from ditpack.demo_model.scenes import (
    COLOURS,
    Random,
    Scene,
    SceneMaker,
    Size,
    choice,
    draw_scale,
    pair_layout,
    plain_layout,
)
from ditpack.demo_model.words import plural

KINDS = ("background", "add", "remove", "double", "swap", "combine")
_SIDES = {"row": ("left", "right"), "column": ("top", "bottom")}
_WHERE = {
    "left": ("on the left", "to the left of it"),
    "right": ("on the right", "to the right of it"),
    "top": ("at the top", "above it"),
    "bottom": ("at the bottom", "below it"),
}


@dataclass(frozen=True, slots=True)
class Edit:
    """``sources`` are the pictures that are sent, in their order; they and ``target`` have the same size."""

    kind: str
    instruction: str
    sources: tuple[Scene, ...]
    target: Scene


class EditMaker:
    """Draws edits. An edit is held out when its target is."""

    def __init__(self, scenes: SceneMaker, captions: Captions) -> None:
        self._scenes = scenes
        self._captions = captions
        self._makers: dict[str, Callable[[Random, Size], Edit]] = {
            "background": self._background,
            "add": self._add,
            "remove": self._remove,
            "double": self._double,
            "swap": self._swap,
        }

    def draw(self, random: Random, kind: str, size: Size, references: int = 1, held_out: bool = False) -> Edit:
        """An edit of ``kind`` with pictures of ``size``; ``references`` counts for "combine" alone, 2 or 3."""
        while True:
            edit = self._combine(random, size, references) if kind == "combine" else self._makers[kind](random, size)
            if self._scenes.held_out(edit.target) == held_out:
                return edit

    def _background(self, random: Random, size: Size) -> Edit:
        source = self._scenes.draw(random, size)
        colour = choice(random, [name for name in COLOURS if name != source.background])
        instruction = choice(
            random,
            (
                f"change the background to {colour}",
                f"make the background {colour}",
                f"put it on a {colour} background",
                f"a {colour} background",
            ),
        )
        return Edit("background", instruction, (source,), replace(source, background=colour))

    def _pair(self, random: Random, size: Size) -> Scene:
        icons = self._scenes.pick(random, 2)
        layout = pair_layout(random, size)
        return Scene(size, layout, icons, self._scenes.background(random), draw_scale(random))

    def _add(self, random: Random, size: Size) -> Edit:
        """To a picture with one thing at a side, or, for a third, in the middle, which then makes room."""
        target = self._pair(random, size)
        place = int(random.integers(2))  # of what is added
        sides = _SIDES[target.layout]
        layout = "centre" if random.random() < 1 / 3 else sides[1 - place]
        source = self._single(target, 1 - place, layout)
        where = choice(random, _WHERE[sides[place]])
        thing = self._captions.thing(random, target.icons[place])
        instruction = choice(random, (f"add {thing} {where}", f"put {thing} {where}", f"draw {thing} {where}"))
        return Edit("add", instruction, (source,), target)

    def _remove(self, random: Random, size: Size) -> Edit:
        """One of two, which leaves the other where it is."""
        source = self._pair(random, size)
        gone = int(random.integers(2))
        sides = _SIDES[source.layout]
        noun = self._captions.noun(random, source.icons[gone])
        where = _WHERE[sides[gone]][0]
        instruction = choice(
            random, (f"remove the {noun}", f"remove the {noun} {where}", f"take away the {noun}", f"delete the {noun}")
        )
        return Edit("remove", instruction, (source,), self._single(source, 1 - gone, sides[1 - gone]))

    def _double(self, random: Random, size: Size) -> Edit:
        icons = self._scenes.pick(random) * 2
        target = Scene(size, plain_layout(size), icons, self._scenes.background(random), draw_scale(random))
        nouns = plural(self._captions.noun(random, icons[0]))
        instruction = choice(
            random, ("make it two", "make two of it", f"turn it into two {nouns}", f"make it two {nouns}", "double it")
        )
        return Edit("double", instruction, (self._single(target, 0, "centre"),), target)

    def _swap(self, random: Random, size: Size) -> Edit:
        source = self._pair(random, size)
        target = replace(source, icons=source.icons[::-1])
        first, second = (self._captions.noun(random, icon) for icon in source.icons)
        sides = "left and right" if source.layout == "row" else "top and bottom"
        instruction = choice(random, (f"swap {sides}", f"swap the {first} and the {second}", "swap the two"))
        return Edit("swap", instruction, (source,), target)

    def _combine(self, random: Random, size: Size, references: int) -> Edit:
        """Things of several pictures, each alone in its own, on the first one's background unless told otherwise."""
        icons = self._scenes.pick(random, references)
        layout = plain_layout(size)
        target = Scene(size, layout, icons, self._scenes.background(random), draw_scale(random))
        sources = [
            replace(self._single(target, k, "centre"), background=self._scenes.background(random))
            for k in range(references)
        ]
        what = "both pictures" if references == 2 else "all three pictures"
        nouns = [self._captions.noun(random, icon) for icon in icons]
        listed = f"the {', the '.join(nouns[:-1])} and the {nouns[-1]}"
        how = "next to each other" if layout == "row" else "above each other"
        of_pictures = f"picture 1 and picture 2{' and picture 3' * (references == 3)}"
        instruction = choice(
            random, (f"combine {what}", f"put {what} together", f"put {listed} {how}", f"combine {of_pictures}")
        )
        if layout == "row" and references == 2 and random.random() < 0.25:
            instruction = f"put the {nouns[0]} on the left and the {nouns[1]} on the right"
        if random.random() < 0.4:
            instruction += f" on a {target.background} background"
        else:
            sources[0] = replace(sources[0], background=target.background)
        return Edit("combine", instruction, tuple(sources), target)

    def _single(self, pair: Scene, place: int, layout: str) -> Scene:
        return Scene(pair.size, layout, (pair.icons[place],), pair.background, pair.scale)
