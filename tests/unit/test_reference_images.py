"""Images to edit: what is accepted and how it is converted, what is refused and why, and the reference's sizes."""

from __future__ import annotations

import base64
import io
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from edit_tools import Stages, encoded, picture
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.editing import Editing, Vision, scaled
from ditpack.models.vision import patchify
from ditpack.reference_images import ImagePreparer, decode_image

PHOTO = picture(64, 48)
PNG, JPEG, WEBP = encoded(PHOTO), encoded(PHOTO, "JPEG"), encoded(PHOTO, "WEBP", lossless=True)


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header claims this size and whose data is a few bytes: a decompression bomb's shape."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def animated(image_format: str) -> bytes:
    frames = [picture(20, 20, seed) for seed in range(3)]
    return encoded(frames[0], image_format, save_all=True, append_images=frames[1:])


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "text": (b"a red apple on a blue background", "must be PNG, JPEG or WebP"),
    "random bytes": (bytes(range(256)) * 9, "must be PNG, JPEG or WebP"),
    "NUL bytes": (bytes(5000), "must be PNG, JPEG or WebP"),
    "URL": (b"https://example.org/photo.png", "URLs are not fetched"),
    "file URL": (b"file:///etc/passwd", "URLs are not fetched"),
    "data URL": (b"data:image/png;base64," + base64.b64encode(PNG), "leave out the data: prefix"),
    "path": (b"/etc/passwd", "paths are not opened"),
    "relative path": (b"../photo.png", "paths are not opened"),
    "file name": (b"photo.png", "paths are not opened"),
    "Windows path": (rb"C:\photos\me.jpg", "paths are not opened"),
    "broken base64": (base64.b64encode(PNG)[:-3] + b"!!!", "is not valid base64"),
    "base64 of a torn file": (base64.b64encode(PNG[:200]), "is truncated or corrupt"),
    "torn PNG": (PNG[: len(PNG) // 2], "is truncated or corrupt"),
    "PNG header alone": (PNG[:33], "is truncated or corrupt"),
    "torn JPEG": (JPEG[: len(JPEG) // 2], "is truncated or corrupt"),
    "JPEG start alone": (JPEG[:20], "is truncated or corrupt"),
    "torn WebP": (WEBP[: len(WEBP) // 2], "is truncated or corrupt"),
    "PNG with a flipped bit": (PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:], "is truncated or corrupt"),
    "GIF": (encoded(PHOTO.quantize(), "GIF"), "must be PNG, JPEG or WebP"),
    "BMP": (encoded(PHOTO, "BMP"), "must be PNG, JPEG or WebP"),
    "TIFF": (encoded(PHOTO, "TIFF"), "must be PNG, JPEG or WebP"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "must be PNG, JPEG or WebP"),
    "animated PNG": (animated("PNG"), "'3 frames': image 1 must be a still image"),
    "animated WebP": (animated("WEBP"), "'3 frames': image 1 must be a still image"),
    "bomb": (png_of(60_000, 60_000), "must not exceed 50000000 pixels"),
    "small bomb": (png_of(8_000, 7_000), "'8000x7000 pixels': image 1 must not exceed 50000000 pixels"),
    "no width": (png_of(0, 10), "is truncated or corrupt"),
    "too many bytes": (PNG + bytes(20 * 2**20), "must not exceed 20971520 bytes"),
    "too much base64": (base64.b64encode(PNG + bytes(20 * 2**20)), "bytes of base64"),
    "a line": (encoded(picture(2000, 1)), "'2000x1 pixels': image 1 is too narrow to edit"),
}


@pytest.fixture(scope="module")
def preparer(tiny_edit_2509_checkpoint: Path) -> ImagePreparer:
    return ImagePreparer(open_checkpoint(tiny_edit_2509_checkpoint))


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused_by_name(name: str, preparer: ImagePreparer) -> None:
    data, said = BAD[name]
    started = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        preparer.prepare(data, 1)
    message = str(caught.value)
    assert message.startswith("IMAGES = ")
    assert said in message
    assert len(message) < 300
    assert time.monotonic() - started < 10  # a bomb is never unpacked


def decoded(data: bytes) -> tuple[np.ndarray, str]:
    image, source = decode_image(data, 1)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int), source


def test_still_formats_are_taken_as_they_are() -> None:
    for data, name, levels in ((PNG, "PNG", 0), (WEBP, "WEBP", 0), (JPEG, "JPEG", 60)):
        pixels, source = decoded(data)
        assert source == f"64x48 {name}"
        assert np.abs(pixels - np.asarray(PHOTO)).max() <= levels


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: shown rotated by 90 degrees clockwise
    pixels, source = decoded(encoded(PHOTO, "PNG", exif=exif))
    assert np.array_equal(pixels, np.rot90(np.asarray(PHOTO), -1))
    assert source == "64x48 PNG; turned as its EXIF orientation says"


def test_transparency_shows_white() -> None:
    image = PHOTO.convert("RGBA")
    image.putalpha(Image.new("L", image.size, 51))
    pixels, source = decoded(encoded(image))
    assert np.abs(pixels - (0.2 * np.asarray(PHOTO) + 0.8 * 255)).max() <= 1
    assert source.endswith("composited on white")
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([255, 0, 0, 0, 255, 0])
    pixels, _ = decoded(encoded(palette, "PNG", transparency=1))
    assert (pixels == 255).all()
    grey = Image.new("LA", (4, 4), (100, 0))
    assert (decoded(encoded(grey))[0] == 255).all()


def test_other_modes_become_rgb() -> None:
    grey = PHOTO.convert("L")
    pixels, source = decoded(encoded(grey))
    assert np.array_equal(pixels, np.repeat(np.asarray(grey)[..., None], 3, axis=2))
    assert source.endswith("; grey to RGB")
    cmyk, source = decoded(encoded(PHOTO.convert("CMYK"), "JPEG", quality=100))
    assert np.abs(cmyk - np.asarray(PHOTO)).mean() < 3
    assert source.endswith("; CMYK to RGB")
    deep = Image.fromarray(np.linspace(0, 65535, 64 * 48).reshape(48, 64).astype(np.uint16))
    pixels, source = decoded(encoded(deep))
    assert np.array_equal(pixels[..., 0], np.asarray(deep) >> 8)  # scaled, not clipped
    assert source.endswith("; 16-bit grey to RGB")
    assert decoded(encoded(PHOTO.quantize(16)))[1].endswith("; palette to RGB")
    assert decoded(encoded(PHOTO.convert("1")))[1].endswith("; black and white to RGB")


def test_a_phones_double_picture_is_its_first() -> None:
    buffer = io.BytesIO()
    PHOTO.save(buffer, "MPO", save_all=True, append_images=[picture(64, 48, 5)], quality=95)
    pixels, source = decoded(buffer.getvalue())
    assert np.abs(pixels - np.asarray(PHOTO)).mean() < 8
    assert source == "64x48 JPEG; the first of its pictures"


@pytest.mark.parametrize("size", [(640, 480), (3000, 1000), (257, 1013), (1024, 1024), (100, 1900), (33, 20)])
@pytest.mark.parametrize("plus", [False, True])
def test_pixels_are_those_of_the_reference_pipelines(size: tuple[int, int], plus: bool) -> None:
    """At the real areas: the pipelines' own resizing, and transformers' own image processor behind it."""
    processor = Qwen2VLImageProcessorPil()
    vision = Vision(14, 2, 2, 56 * 56, 28 * 28 * 1280, tuple(processor.image_mean), tuple(processor.image_std))
    editing = Editing(3, plus, 384 if plus else 1024, 1024, vision)
    image, ratio = picture(*size), size[0] / size[1]
    reference = pipeline_qwenimage_edit_plus.calculate_dimensions(1024 * 1024, ratio)
    first = pipeline_qwenimage_edit_plus.calculate_dimensions(384 * 384, ratio) if plus else reference
    assert editing.sizes(size) == (reference, first, editing.vision.size(first))

    checkpoint = type("Checkpoint", (), {"editing": editing, "family": "test"})()
    made = ImagePreparer(checkpoint).prepare(encoded(image), 1)
    vae = VaeImageProcessor(vae_scale_factor=16)
    theirs = vae.preprocess(image, reference[1], reference[0])[0].permute(1, 2, 0)
    assert torch.equal(2 * (torch.from_numpy(made.reference).float() / 255) - 1, theirs)
    patches = processor(vae.resize(image, first[1], first[0]), return_tensors="pt")
    ours = patchify(
        (torch.from_numpy(made.condition) / 255 - torch.tensor(vision.mean)) / torch.tensor(vision.std), vision
    )
    assert torch.allclose(ours, patches["pixel_values"], atol=1e-6)
    assert vision.grid(made.condition.shape[1::-1]) == tuple((patches["image_grid_thw"][0, [2, 1]] // 2).tolist())


def test_rounding_is_to_the_even_multiple() -> None:
    assert scaled(1024, 1.0) == (1024, 1024)
    assert scaled(48, 1.0) == (64, 64)  # 1.5 rounds to 2
    assert scaled(80, 1.0) == (64, 64)  # and 2.5 too


def test_sizes_left_out_are_those_of_the_last_image(tiny_edit_2509_checkpoint: Path) -> None:
    stages = Stages(tiny_edit_2509_checkpoint)
    values = {"PROMPT": "x", "NUM_INFERENCE_STEPS": 1}
    wide, tall = picture(200, 60), picture(60, 200)
    for images, changes, size in [
        ([wide, tall], {}, (32, 128)),
        ([tall, wide], {}, (128, 32)),
        ([tall, wide], {"WIDTH": 48, "HEIGHT": 80}, (48, 80)),
        ([tall, wide], {"WIDTH": 48}, (48, 32)),
        ([], {}, (64, 64)),
    ]:
        request = stages.begin({**values, **changes}, images).request
        assert (request.width, request.height) == size
