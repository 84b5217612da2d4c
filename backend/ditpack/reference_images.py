"""Encoded images to edit → RGB pixels at the sizes that the models take. What is wrong with one is said by name.

Only bytes are taken: nothing is ever fetched or opened by a name that a client sent.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from ditpack.errors import InvalidRequest
from ditpack.fields import Field
from ditpack.models.checkpoint import Checkpoint, CheckpointError
from ditpack.models.editing import EDITING_FAMILIES
from ditpack.request import Reference

FIELD = "IMAGES"
MAX_BYTES = 20 * 2**20
MAX_PIXELS = 50_000_000
FIELDS = {
    FIELD: Field(
        unsent="required",
        about="1 … 3 PNG, JPEG or WebP files (1 for Qwen-Image-Edit), or the base64 of them; each of at most "
        f"`max_image_bytes` ({MAX_BYTES}) and `max_image_pixels` ({MAX_PIXELS}); no URLs, paths or animations",
    )
}
_MAX_RATIO = 200  # where transformers' image processor draws the line
_FORMATS = ("PNG", "JPEG", "WEBP")
_BASE64_STARTS = (b"iVBORw0KGgo", b"/9j/", b"UklGR")  # the same formats' first bytes
_EXIF_ORIENTATION = 0x0112

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Prepared:
    """One image as the VAE (``reference``) and as the vision tower (``condition``) take it, uint8 [H, W, 3] each."""

    about: Reference
    reference: Pixels
    condition: Pixels


class ImagePreparer:
    """Decodes and resizes images for one checkpoint, as its diffusers pipeline resizes them. Any thread may use it.

    Raises:
        CheckpointError: the checkpoint cannot edit images.
    """

    def __init__(self, checkpoint: Checkpoint, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS) -> None:
        if checkpoint.editing is None:
            raise CheckpointError(
                f"{checkpoint.path / 'model_index.json'}: _class_name = {checkpoint.family!r}: cannot edit images; "
                f"must be {' or '.join(EDITING_FAMILIES)} for that"
            )
        self._editing = checkpoint.editing
        self._family = checkpoint.family
        self._max_bytes, self._max_pixels = max_bytes, max_pixels

    def check_count(self, count: int) -> None:
        """Raise InvalidRequest when the checkpoint does not edit that many images."""
        most = self._editing.max_references
        if not 1 <= count <= most:
            allowed = "1 image" if most == 1 else f"1 … {most} images"
            raise InvalidRequest(FIELD, f"{count} images", f"must be {allowed} for this {self._family}")

    def prepare(self, data: bytes, number: int) -> Prepared:
        """The ``number``-th image (from 1).

        Raises:
            InvalidRequest: naming the image, what was found and what is allowed.
        """
        image, source = decode_image(data, number, self._max_bytes, self._max_pixels)
        sizes = self._editing.sizes(image.size)
        if sizes is None or max(image.size) > _MAX_RATIO * min(image.size):
            raise _refused(number, f"{image.width}x{image.height} pixels", "is too narrow to edit")
        reference, first, condition = sizes
        shown = image.resize(first, Image.Resampling.LANCZOS).resize(condition, Image.Resampling.BICUBIC)
        encoded = image.resize(reference, Image.Resampling.LANCZOS)
        return Prepared(Reference(*reference, source), np.array(encoded), np.array(shown))

    def tokens(self, image: Prepared) -> int:
        """How many tokens the image takes in the prompt."""
        height, width = image.condition.shape[:2]
        return math.prod(self._editing.vision.grid((width, height)))


def decode_image(
    data: bytes, number: int, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS
) -> tuple[Image.Image, str]:
    """One encoded image → RGB, and what it was and what was done to it.

    Raises:
        InvalidRequest: as ``ImagePreparer.prepare``.
    """
    done = []
    if data.startswith(_BASE64_STARTS):
        data = _from_base64(data, number, max_bytes)
        done.append("base64 decoded")
    if len(data) > max_bytes:
        raise _refused(number, f"{len(data)} bytes", f"must not exceed {max_bytes} bytes")
    if not data:
        raise _refused(number, "0 bytes", "is empty")
    try:
        # Reads the header alone; a format is tried by its own first bytes, whatever the sender calls it.
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError:
        raise _refused(number, f"{len(data)} bytes", f"must not exceed {max_pixels} pixels") from None
    except Exception:  # Pillow's decoders raise whatever they like at broken data
        raise _refused(number, data[:24], _why_no_image(data)) from None
    with image:
        width, height = image.size
        if width * height > max_pixels:
            raise _refused(number, f"{width}x{height} pixels", f"must not exceed {max_pixels} pixels")
        if getattr(image, "is_animated", False) and image.format != "MPO":
            frames = getattr(image, "n_frames", 2)
            raise _refused(number, f"{frames} frames", "must be a still image; send the frame to edit by itself")
        try:
            image.load()
            rgb = _as_rgb(image, done)
        except Exception:  # as above
            raise _refused(number, f"{image.format} of {len(data)} bytes", "is truncated or corrupt") from None
    return rgb, "; ".join((f"{width}x{height} {'JPEG' if image.format == 'MPO' else image.format}", *done))


def _from_base64(data: bytes, number: int, max_bytes: int) -> bytes:
    if len(data) > 4 * (max_bytes // 3 + 1):
        raise _refused(number, f"{len(data)} bytes of base64", f"must not exceed {max_bytes} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error:
        raise _refused(number, data[:24], "is not valid base64") from None


def _as_rgb(image: Image.Image, done: list[str]) -> Image.Image:
    """``image`` upright, opaque, 8 bit, RGB. What had to be done for it is added to ``done``."""
    if image.format == "MPO":
        done.append("the first of its pictures")
    if image.getexif().get(_EXIF_ORIENTATION, 1) != 1:
        done.append("turned as its EXIF orientation says")
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip instead of scale
        done.append("16-bit grey to RGB")
        high_byte = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(high_byte.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        done.append("composited on white")
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode != "RGB":
        done.append({"L": "grey", "1": "black and white", "P": "palette"}.get(image.mode, image.mode) + " to RGB")
        return image.convert("RGB")
    return image


def _why_no_image(data: bytes) -> str:
    if data.lstrip()[:5].lower() == b"data:":
        return "must be the image file itself, or plain base64: leave out the data: prefix"
    if re.match(rb"\s*[A-Za-z][\w+.-]*://", data):
        return "must be the image file itself: URLs are not fetched"
    if len(data) < 300 and re.fullmatch(rb"\s*([A-Za-z]:|~)?[\w ./\\-]*([/\\]|\.\w{3,4})[\w ./\\-]*\s*", data):
        return "must be the image file itself: paths are not opened"
    if data.startswith((b"\x89PNG", b"\xff\xd8", b"RIFF")):
        return "is truncated or corrupt"
    return f"must be {', '.join(_FORMATS[:-1])} or WebP"


def _refused(number: int, found: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(FIELD, found, f"image {number} {allowed}")
