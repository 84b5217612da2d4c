"""Edits through the client and `ditpack edit`, against the fake server, on every transport."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from fake_kserve import Painter
from PIL import Image
from test_client_cli import run

from ditpack_client import AsyncClient, Client, EditRequest, GenerationError, ImageRequest, ImageResult
from ditpack_client.cli import edit


@pytest.fixture
def painter() -> Painter:
    return Painter()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (40, 30), "teal").save(path)
    return path


def test_images_of_every_kind_are_sent_as_files(url: str, painter: Painter, photo: Path) -> None:
    drawn = Image.new("RGBA", (8, 9), (1, 2, 3, 4))

    async def awaited() -> ImageResult:
        async with AsyncClient(url) as client:
            return await client.edit("snow", [photo.read_bytes(), photo, drawn], seed=5)

    with Client(url) as client:
        results = [client.edit("snow", [photo.read_bytes(), str(photo), drawn], seed=5), asyncio.run(awaited())]
    for result, request in zip(results, painter.requests, strict=True):
        assert (result.model, result.seed) == ("qwen_image_edit", 5)
        kind, shape, (first, second, third) = request["IMAGES"]
        assert (kind, shape) == ("BYTES", (3,))
        assert first == second == photo.read_bytes()
        with Image.open(io.BytesIO(third)) as image:
            assert (image.format, image.mode, image.getpixel((0, 0))) == ("PNG", "RGBA", (1, 2, 3, 4))
    assert painter.models == ["qwen_image_edit"] * 2


def test_one_image_needs_no_list(url: str, painter: Painter, photo: Path) -> None:
    with Client(url, edit_model="qwen_image_edit") as client:
        client.edit("snow", photo)
    assert painter.requests[0]["IMAGES"][1] == (1,)


def test_edits_among_many(url: str, painter: Painter, photo: Path) -> None:
    requests: list[ImageRequest] = [{"prompt": "a kite"}, EditRequest(prompt="snow", images=[photo])]
    with Client(url) as client:
        found = dict(client.generate_many(requests))
    assert [getattr(found[index], "model", None) for index in (0, 1)] == ["qwen_image", "qwen_image_edit"]


def test_a_file_that_cannot_be_read(url: str, tmp_path: Path) -> None:
    with (
        Client(url) as client,
        pytest.raises(GenerationError, match=r"cannot read .*none\.png: No such file") as caught,
    ):
        client.edit("snow", tmp_path / "none.png")
    assert caught.value.code == "INVALID_ARG"


def test_the_command(url: str, painter: Painter, photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    result = run(
        edit, str(photo), "make it snow", "--image", str(photo), "--steps", "3", "-o", str(out), "--server", url
    )
    assert result.exit_code == 0, result.output
    sent = {name: value for name, (_, _, value) in painter.requests[0].items()}
    assert sent == {
        "IMAGES": [photo.read_bytes()] * 2,
        "PROMPT": b"make it snow",
        "NUM_INFERENCE_STEPS": 3,
        "OUTPUT_FORMAT": b"png",
    }
    assert painter.models == ["qwen_image_edit"]
    assert out.exists()


def test_the_command_without_its_image(url: str, painter: Painter) -> None:
    result = run(edit, "none.jpg", "make it snow", "--server", url)
    assert result.exit_code == 2
    assert "cannot read none.jpg" in result.output
    assert not painter.requests
