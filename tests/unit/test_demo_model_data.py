"""The scenes that the embedded model learns from: packages and their hashes, words, pixels, captions and edits."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ditpack.demo_model.captions import Captions
from ditpack.demo_model.edits import KINDS, Edit, EditMaker
from ditpack.demo_model.icons import Icon, rasterise, read_icons
from ditpack.demo_model.judge.checks import background_of, place_of, regions
from ditpack.demo_model.packages import Package, PackageError, fetch, read_json
from ditpack.demo_model.render import batch, draw, render, to_bytes
from ditpack.demo_model.scenes import COLOURS, PLACES, Scene, SceneMaker
from ditpack.demo_model.shapes import shape_icons
from ditpack.demo_model.words import plural, spoken, synonyms, with_article

ICONS = shape_icons()
SCENES = SceneMaker(ICONS)
SPRITES = rasterise(ICONS, 64)
CAPTIONS = Captions(ICONS, synonym_share=0)


def index(name: str, style: str = "flat") -> int:
    return next(k for k, icon in enumerate(ICONS) if (icon.name, icon.style) == (name, style))


# --- packages


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """A tiny icon set as npm packs one, "published" in a folder."""
    icons = {
        "icons": {
            "red-apple": {"body": '<circle cx="8" cy="8" r="8" fill="red"/>'},
            "hidden-apple": {"body": "<g/>", "hidden": True},
            "wave-dark-skin-tone": {"body": "<g/>"},
            "letter-a": {"body": "<g/>"},
            "two-oclock": {"body": "<g/>"},
            "two-hearts": {"body": "<g/>"},
        },
        "width": 16,
        "height": 16,
    }
    food = ["red-apple", "hidden-apple", "wave-dark-skin-tone", "two-oclock", "two-hearts"]
    metadata = {"categories": {"Food & Drink": food, "Symbols": ["letter-a"]}}
    folder = tmp_path / "registry" / "@test" / "icons" / "-"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "icons-1.0.0.tgz", "w:gz") as archive:
        for name, values in (("icons.json", icons), ("metadata.json", metadata)):
            data = json.dumps(values).encode()
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    digest = hashlib.sha512((folder / "icons-1.0.0.tgz").read_bytes()).digest()
    integrity = f"sha512-{base64.b64encode(digest).decode()}"
    return Package("@test/icons", "1.0.0", integrity, registry=(tmp_path / "registry").as_uri())


def test_a_package_is_fetched_once_and_read(package: Package, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    file = fetch(package, cache)
    assert file == cache / "test-icons-1.0.0.tgz"
    offline = dataclasses.replace(package, registry=(tmp_path / "nowhere").as_uri())
    assert fetch(offline, cache) == file
    icons = read_icons(file, "flat")
    assert [icon.name for icon in icons] == ["red-apple"]  # no hidden one, skin tone, symbol, clock or plural
    assert 'viewBox="0 0 16 16"' in icons[0].svg
    with pytest.raises(PackageError, match=r"chars\.json"):
        read_json(file, "chars.json")


def test_what_is_not_the_pinned_package_is_refused(package: Package, tmp_path: Path) -> None:
    wrong = dataclasses.replace(package, integrity="sha512-AAAA")
    with pytest.raises(PackageError, match=r"its hash is sha512-.*must be sha512-AAAA"):
        fetch(wrong, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    file = fetch(package, tmp_path / "cache")
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(PackageError, match="its hash is"):
        fetch(package, tmp_path / "cache")


def test_without_a_network_it_says_what_to_do(package: Package, tmp_path: Path) -> None:
    gone = dataclasses.replace(package, registry=(tmp_path / "nowhere").as_uri())
    with pytest.raises(PackageError, match=r"npm pack @test/icons@1\.0\.0"):
        fetch(gone, tmp_path / "cache")


# --- words


@pytest.mark.parametrize(
    ("name", "one", "several"),
    [
        ("cat", "a cat", "cats"),
        ("umbrella", "an umbrella", "umbrellas"),
        ("unicorn", "a unicorn", "unicorns"),
        ("face-with-tears-of-joy", "a face with tears of joy", "faces with tears of joy"),
        ("cherries", "cherries", "cherries"),
        ("mouse-face", "a mouse face", "mouse faces"),
        ("computer-mouse", "a computer mouse", "computer mice"),
        ("bus", "a bus", "buses"),
        ("strawberry", "a strawberry", "strawberries"),
        ("t-shirt", "a t-shirt", "t-shirts"),
    ],
)
def test_names_become_english(name: str, one: str, several: str) -> None:
    assert (with_article(spoken(name)), plural(spoken(name))) == (one, several)


def test_synonyms_are_of_one_icon_each() -> None:
    """People's own words; a word of two icons would teach neither."""
    words = [word for others in synonyms().values() for word in others]
    assert len(words) == len(set(words))
    assert not {spoken(name) for name in synonyms()} & set(words)
    assert "kitty" in synonyms()["cat-face"]
    assert "car" in synonyms()["automobile"]


def test_captions_use_synonyms() -> None:
    icons = [Icon("automobile", "flat", ""), Icon("cat-face", "glossy", "")]
    scenes, captions = SceneMaker(icons), Captions(icons, synonym_share=0.5)
    random = np.random.default_rng(0)
    text = " ".join(captions.caption(random, Scene((64, 64), "centre", (k % 2,), "white")) for k in range(60))
    assert all(word in text for word in ("automobile", "car", "cat face", "kitty"))
    assert scenes.style(Scene((64, 64), "centre", (1,), "white")) == "glossy"


# --- scenes and pixels


@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize("size", [(128, 128), (160, 96), (64, 128)])
def test_a_place_can_be_read_back(layout: str, size: tuple[int, int]) -> None:
    picture = draw(SPRITES, Scene(size, layout, (index("red-circle"),), "teal"))
    assert picture.shape == (size[1], size[0], 3)
    assert place_of(picture) == layout


@pytest.mark.parametrize("colour", COLOURS)
def test_a_background_can_be_read_back(colour: str) -> None:
    picture = draw(SPRITES, Scene((96, 64), "row", (index("blue-square"), index("yellow-star")), colour))
    assert background_of(picture) == colour


def test_every_icon_is_where_its_layout_says() -> None:
    """Each cell alone has the icon's own colour in its middle; nothing is drawn outside of the cells' reach."""
    colours = {"red-circle": (224, 32, 32), "blue-square": (32, 80, 224), "purple-heart": (128, 48, 192)}
    icons = tuple(index(name) for name in colours)
    for layout, size in (("row", (192, 64)), ("column", (64, 192)), ("grid", (128, 128))):
        picture = draw(SPRITES, Scene(size, layout, icons, "white"))
        for part, colour in zip(regions(picture, layout, 3), colours.values(), strict=True):
            height, width = part.shape[:2]
            assert np.abs(part[height // 2, width // 2].astype(int) - colour).max() < 12
            assert (part[0] > 250).all()


def test_a_picture_of_a_batch_is_the_picture_alone() -> None:
    random = np.random.default_rng(1)
    scenes = [SCENES.draw(random, (128, 96)) for _ in range(12)]
    together = to_bytes(render(SPRITES, batch(scenes, SPRITES.side))).numpy()
    for scene, picture in zip(scenes, together, strict=True):
        assert np.array_equal(draw(SPRITES, scene), picture)


def test_held_out_scenes_are_nobody_elses() -> None:
    random = np.random.default_rng(2)
    trained = {SCENES.key(SCENES.draw(random, (128, 128))) for _ in range(400)}
    held_out = {SCENES.key(SCENES.draw(random, (96, 96), held_out=True)) for _ in range(100)}
    assert held_out
    assert not trained & held_out


def test_a_caption_says_what_is_there() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        scene = SCENES.draw(random, [(128, 128), (160, 96), (96, 160)][random.integers(3)])
        text = CAPTIONS.caption(random, scene)
        names = {spoken(ICONS[icon].name) for icon in scene.icons}
        assert all(name in text for name in names)
        assert not any(spoken(icon.name) in text for icon in ICONS if spoken(icon.name) not in names)
        assert (f"{scene.background} background" in text) or scene.background == "white"
        if scene.count > 1 and scene.alike:
            assert text.startswith((("two", "2"), ("three", "3"), ("four", "4"))[scene.count - 2])
        if scene.count == 1:
            assert (scene.layout in text) == (scene.layout != "centre")
        if " style" in text:
            assert text.endswith(f", {SCENES.style(scene)} style")


# --- edits


def edit(kind: str, seed: int, size: tuple[int, int] = (128, 128), references: int = 2) -> Edit:
    return EditMaker(SCENES, CAPTIONS).draw(np.random.default_rng(seed), kind, size, references)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_changes_what_it_says_and_nothing_else(kind: str) -> None:
    for seed in range(40):
        size = ((128, 128), (160, 96), (96, 160))[seed % 3]
        made = edit(kind, seed, size)
        source, target = made.sources[0], made.target
        assert {scene.size for scene in (*made.sources, target)} == {size}
        if kind == "background":
            assert dataclasses.replace(source, background=target.background) == target
            assert target.background in made.instruction
        elif kind == "add":
            added = target.icons[0 if source.icons[0] == target.icons[1] else 1]
            assert spoken(ICONS[added].name) in made.instruction
            side = {"row": ("left", "right"), "column": ("top", "bottom")}[target.layout][target.icons.index(added)]
            side_words = {"top": ("top", "above"), "bottom": ("bottom", "below")}.get(side, (side,))
            assert any(word in made.instruction for word in side_words)
        elif kind == "remove":
            gone = next(icon for icon in source.icons if icon not in target.icons)
            assert spoken(ICONS[gone].name) in made.instruction
            kept = source.items()[source.icons.index(target.icons[0])]
            assert target.items() == [kept]  # the other one stays exactly where it was
        elif kind == "double":
            assert target.icons == source.icons * 2
        elif kind == "swap":
            assert target.icons == source.icons[::-1]
        else:
            assert target.icons == tuple(scene.icons[0] for scene in made.sources)
            assert target.background in (made.sources[0].background, made.instruction.split()[-2])


def test_three_pictures_are_combined_in_their_order() -> None:
    made = edit("combine", 5, (160, 96), references=3)
    assert len(made.sources) == 3
    assert made.target.layout == "row"
    assert made.target.icons == tuple(scene.icons[0] for scene in made.sources)
