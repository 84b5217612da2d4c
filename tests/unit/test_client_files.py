"""What the client writes: PNG settings, file names, the contact sheet."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image, ImageFont

from ditpack_client import ImageResult
from ditpack_client.contact_sheet import Entry, contact_sheet, wrap
from ditpack_client.naming import Naming, slug
from ditpack_client.result import read_settings

COLOURS = ["#ff0000", "#00ff00", "#0000ff", "#ff00ff", "#00ffff"]


def make_result(output_format: str = "png", prompt: str = "ein roter Drachen – 赤い凧") -> ImageResult:
    image = Image.new("RGB", (64, 48), "#3366cc")
    file = io.BytesIO()
    image.save(file, format=output_format)
    request = {"prompt": prompt, "negative_prompt": " ", "num_inference_steps": 20, "true_cfg_scale": 4.0}
    return ImageResult(image, 7, {"request": request}, file.getvalue(), output_format, "qwen_image")


def test_png_keeps_the_settings(tmp_path: Path) -> None:
    make_result().save(tmp_path / "a.png")
    settings = read_settings(tmp_path / "a.png")
    assert settings is not None
    assert settings.pop("version")
    assert settings == {
        "prompt": "ein roter Drachen – 赤い凧",
        "negative_prompt": " ",
        "size": "64x48",
        "num_inference_steps": 20,
        "true_cfg_scale": 4.0,
        "seed": 7,
        "model": "qwen_image",
    }
    with Image.open(tmp_path / "a.png") as image:
        assert image.getpixel((3, 3)) == (0x33, 0x66, 0xCC)
        assert json.loads(image.info["parameters"])["seed"] == 7


def test_png_without_settings(tmp_path: Path) -> None:
    make_result().save(tmp_path / "a.png", metadata=False)
    assert read_settings(tmp_path / "a.png") is None
    assert b"Drachen" not in (tmp_path / "a.png").read_bytes()


@pytest.mark.parametrize(("output_format", "name"), [("jpeg", "a.jpg"), ("jpeg", "a.JPEG"), ("webp", "a.webp")])
def test_other_formats_are_written_as_they_came(tmp_path: Path, output_format: str, name: str) -> None:
    result = make_result(output_format)
    result.save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == result.data


def test_format_is_the_names(tmp_path: Path) -> None:
    make_result("png").save(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as image:
        assert image.format == "JPEG"
    with pytest.raises(ValueError, match="no image format"):
        make_result().save(tmp_path / "a.txt")


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def names(naming: Naming, *results: tuple[str, int]) -> list[str]:
    return [str(naming.path(index, prompt, seed)) for index, (prompt, seed) in enumerate(results, start=1)]


def test_names_without_an_output() -> None:
    assert names(Naming(None, None, 2), ("A red kite!", 7), ("A red kite!", 8)) == [
        "a-red-kite-7.png",
        "a-red-kite-8.png",
    ]
    assert names(Naming(None, "jpeg", 1), ("A red kite!", 7)) == ["a-red-kite-7.jpg"]


def test_one_image_gets_the_name_it_was_given() -> None:
    Path("kite.png").touch()
    assert names(Naming("kite.png", None, 1), ("x", 7)) == ["kite.png"]
    assert names(Naming("kite", None, 1), ("x", 7)) == ["kite.png"]
    assert names(Naming("kite", "webp", 1), ("x", 7)) == ["kite.webp"]
    assert Naming("kite.JPG", None, 1).output_format == "jpeg"


def test_several_images_for_one_name_are_numbered() -> None:
    assert names(Naming("out/kite.png", None, 3), ("x", 7), ("y", 7)) == ["out/kite-1.png", "out/kite-2.png"]
    assert names(Naming("kite.png", None, 12), ("x", 7)) == ["kite-01.png"]


def test_pattern_and_directory() -> None:
    assert names(Naming("{index}_{prompt}_{seed}.webp", None, 2), ("A kite", 7)) == ["1_a-kite_7.webp"]
    Path("existing").mkdir()
    for directory in ("existing", "new/"):
        assert names(Naming(directory, None, 2), ("A kite", 7)) == [str(Path(directory) / "a-kite-7.png")]


def test_two_results_never_share_a_name() -> None:
    expected = ["a-kite-7.png", "a-kite-7-2.png", "a-kite-7-3.png"]
    assert names(Naming(None, None, 3), ("A kite", 7), ("a kite!", 7), ("a kite", 7)) == expected
    assert names(Naming("{prompt}.png", None, 2), ("A kite", 7), ("a kite", 8)) == ["a-kite.png", "a-kite-2.png"]


def test_names_that_were_not_chosen_replace_nothing() -> None:
    Path("a-kite-7.png").touch()
    assert names(Naming(None, None, 1), ("A kite", 7)) == ["a-kite-7-2.png"]


@pytest.mark.parametrize(
    ("output", "output_format", "message"),
    [
        ("kite.png", "jpeg", "not jpeg"),
        ("kite.gif", None, "no image format"),
        ("{size}.png", None, "{size}"),
        ("{}.png", None, "{}"),
        ("{seed!x}.png", None, "{seed!x}"),
        ("{seed:999999999}.png", None, "{seed:999999999}"),
    ],
)
def test_bad_outputs(output: str, output_format: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=r"the file name|no image format") as caught:
        Naming(output, output_format, 1)
    assert message in str(caught.value)


def test_slug() -> None:
    assert slug("A red kite, glossy style") == "a-red-kite-glossy-style"
    assert slug("../../etc/passwd") == "etc-passwd"
    assert slug("赤い凧") == "赤い凧"
    assert slug("!?") == "image"
    assert len(slug("word " * 100)) <= 48
    assert len(slug("w" * 500)) <= 48


def entry(index: int, size: tuple[int, int], caption: str = "a red kite") -> Entry:
    return Entry(Image.new("RGB", size, COLOURS[index]), caption, "64x64 · 20 steps · seed 7")


def test_contact_sheet_shows_every_image_whole_and_apart() -> None:
    sizes = [(64, 64), (192, 64), (64, 160), (96, 96), (128, 128)]
    sheet = contact_sheet([entry(i, size) for i, size in enumerate(sizes)], title="Title", columns=3, scale=2)
    boxes = []
    for colour, (width, height) in zip(COLOURS, sizes, strict=True):
        wanted = tuple(bytes.fromhex(colour[1:]))
        mask = sheet.convert("RGB").point(lambda value: value)
        pixels = [
            (x, y) for y in range(mask.height) for x in range(0, mask.width, 8) if mask.getpixel((x, y)) == wanted
        ]
        xs, ys = [x for x, _ in pixels], [y for _, y in pixels]
        assert max(ys) - min(ys) + 1 == 2 * height
        assert abs(max(xs) - min(xs) + 8 - 2 * width) <= 8
        boxes.append((min(xs), min(ys), max(xs), max(ys)))
    assert boxes[0][3] == boxes[1][3] == boxes[2][3]  # a row stands on one line
    assert boxes[3][1] > boxes[0][3]
    assert boxes[0][2] < boxes[1][0] < boxes[1][2] < boxes[2][0]


def test_contact_sheet_grows_with_its_captions() -> None:
    short = contact_sheet([entry(0, (64, 64))], title="T")
    long = contact_sheet([entry(0, (64, 64), "a very long caption " * 10)], title="T")
    assert (long.width, long.height > short.height + 100) == (short.width, True)
    with pytest.raises(ValueError, match="at least one"):
        contact_sheet([], title="T")


def test_wrap_keeps_every_word_within_the_width() -> None:
    font = ImageFont.load_default(19)
    text = "two pink hearts and a Donaudampfschifffahrtsgesellschaftskapitän on a teal background"
    lines = wrap(text, font, 150)
    assert all(font.getlength(line) <= 150 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert wrap("", font, 150) == []
