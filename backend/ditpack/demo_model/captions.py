"""What scenes are called: several ways to say the same, none of which says what is not there."""

from __future__ import annotations

from collections.abc import Sequence

from ditpack.demo_model.icons import Icon
from ditpack.demo_model.scenes import Random, Scene, choice
from ditpack.demo_model.words import plural, spoken, synonyms, with_article

NUMBERS = {2: "two", 3: "three", 4: "four"}
_DIGITS = {2: "2", 3: "3", 4: "4"}
_SINGLE_PLACES = {
    "left": ("on the left",),
    "right": ("on the right",),
    "top": ("at the top",),
    "bottom": ("at the bottom",),
}


class Captions:
    """``synonym_share``: how often an icon that has other words is called by one of them."""

    def __init__(self, icons: Sequence[Icon], synonym_share: float = 0.3) -> None:
        self._icons = icons
        self._synonym_share = synonym_share

    def noun(self, random: Random, icon: int) -> str:
        name = self._icons[icon].name
        others = synonyms().get(name, ())
        if others and random.random() < self._synonym_share:
            return str(choice(random, others))
        return spoken(name)

    def thing(self, random: Random, icon: int) -> str:
        return with_article(self.noun(random, icon))

    def caption(self, random: Random, scene: Scene) -> str:
        """A caption of ``scene``. The background is left out only where it is white, the style half of the time."""
        text = self._things(random, scene)
        if scene.background != "white" or random.random() < 0.1:
            text += f" on {with_article(scene.background)} background"
        if random.random() < 0.5:
            text += f", {self._icons[scene.icons[0]].style} style"
        return text

    def _things(self, random: Random, scene: Scene) -> str:
        if scene.count == 1:
            noun = self.noun(random, scene.icons[0])
            thing = with_article(noun) if random.random() < 0.8 else noun
            places = _SINGLE_PLACES.get(scene.layout)
            return f"{thing} {choice(random, places)}" if places else thing
        if scene.alike:
            number = (NUMBERS if random.random() < 0.9 else _DIGITS)[scene.count]
            return f"{number} {plural(self.noun(random, scene.icons[0]))}"
        things = [self.thing(random, icon) for icon in scene.icons]
        if scene.count > 2:
            return f"{', '.join(things[:-1])} and {things[-1]}"
        first, second = things
        if scene.layout == "row":
            ways = (
                f"{first} on the left and {second} on the right",
                f"{first} next to {second}",
                f"{first} and {second}",
            )
        else:
            ways = (f"{first} above {second}", f"{second} below {first}", f"{first} on top of {second}")
        return str(choice(random, ways))
