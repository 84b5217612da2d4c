"""Icon names as people write them: articles, plurals, and other words for the same thing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_SYNONYMS = Path(__file__).with_name("synonyms.txt")
# Names whose hyphens are not spaces.
_SPELT = {
    "e-mail": "e-mail",
    "t-rex": "t-rex",
    "t-shirt": "t-shirt",
    "x-ray": "x-ray",
    "yo-yo": "yo-yo",
    "jack-o-lantern": "jack-o-lantern",
    "pool-8-ball": "pool 8 ball",
    "mans-shoe": "man's shoe",
    "womans-boot": "woman's boot",
    "womans-clothes": "woman's clothes",
    "womans-hat": "woman's hat",
    "womans-sandal": "woman's sandal",
}
# What follows one of these belongs to the noun before it: "faces with tears of joy".
_BINDERS = frozenset(
    (
        *("with", "without", "of", "in", "on", "over", "at", "behind", "from", "for", "blowing", "holding"),
        *("savoring", "screaming", "showing", "shaking", "exhaling", "vomiting", "fluttering"),
    )
)
_IRREGULAR = {
    "mouse": "mice",
    "goose": "geese",
    "wolf": "wolves",
    "knife": "knives",
    "leaf": "leaves",
    "man": "men",
    "fish": "fish",
    "blowfish": "blowfish",
    "jellyfish": "jellyfish",
    "deer": "deer",
    "moose": "moose",
    "bison": "bison",
    "squid": "squid",
    "sheep": "sheep",
    "ox": "oxen",
    "potato": "potatoes",
    "tomato": "tomatoes",
    "mango": "mangoes",
    "volcano": "volcanoes",
}
_ENDS_IN_S_BUT_SINGULAR = ("ss", "us", "is")


def spoken(name: str) -> str:
    """An icon's name as words: "red-apple" → "red apple"."""
    return _SPELT.get(name) or name.replace("-", " ")


def with_article(noun: str) -> str:
    """ "a cat", "an owl", and "cherries" as it is."""
    if is_plural(noun):
        return noun
    return f"{'an' if noun[0] in 'aeiou' and not noun.startswith(('eu', 'uni')) else 'a'} {noun}"


def plural(noun: str) -> str:
    """ "cats", "faces with tears of joy", "mice"."""
    words = noun.split()
    end = next((place for place, word in enumerate(words) if place and word in _BINDERS), len(words))
    words[end - 1] = _plural_word(words[end - 1])
    return " ".join(words)


def is_plural(noun: str) -> bool:
    """Whether the noun already names several, as "cherries" and "scissors" do."""
    head = noun.split()
    end = next((place for place, word in enumerate(head) if place and word in _BINDERS), len(head))
    return head[end - 1].endswith("s") and not head[end - 1].endswith(_ENDS_IN_S_BUT_SINGULAR)


@cache
def synonyms() -> dict[str, tuple[str, ...]]:
    """Icon name → other words for it, from ``synonyms.txt``: a line "name: word, word" each."""
    table = {}
    for line in _SYNONYMS.read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, words = line.partition(":")
            table[name.strip()] = tuple(word.strip() for word in words.split(","))
    return table


def _plural_word(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("s") and not word.endswith(_ENDS_IN_S_BUT_SINGULAR):
        return word
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return f"{word}es"
    if word.endswith("y") and len(word) > 1 and word[-2] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}s"
