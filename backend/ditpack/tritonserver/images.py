"""Pixels to image files."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

# PNG is lossless at any level; 4 saves time against Pillow's 6 for a few per cent in size. JPEG and WebP at a quality
# whose loss is hard to see; JPEG with full-resolution colour, because generated images have hard coloured edges.
_SETTINGS: dict[str, dict[str, Any]] = {
    "png": {"compress_level": 4},
    "jpeg": {"quality": 92, "subsampling": 0},
    "webp": {"quality": 90, "method": 4},
}


def encode_image(pixels: npt.NDArray[np.uint8], output_format: str, response_format: str) -> bytes:
    """``pixels``, uint8 [H, W, 3], as a png, jpeg or webp file; for b64_json as the base64 text of that file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=output_format, **_SETTINGS[output_format])
    data = buffer.getvalue()
    return base64.b64encode(data) if response_format == "b64_json" else data
