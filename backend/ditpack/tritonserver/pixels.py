"""Images of any sizes as two tensors: all their pixels one after the other, and the size of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import triton_python_backend_utils as pb_utils

from ditpack.errors import InvalidRequest
from ditpack.tritonserver.tensors import Array, read_array


def write_pixels(images: Sequence[Array]) -> tuple[Array, Array]:
    """uint8 [H, W, 3] each → PIXELS, uint8 [sum of H · W, 3], and SIZES, int32 [images, 2] (height, width)."""
    pixels = np.concatenate([image.reshape(-1, 3) for image in images])
    return pixels, np.array([image.shape[:2] for image in images], dtype=np.int32)


def read_pixels(request: pb_utils.InferenceRequest) -> list[Array]:
    """The images of the inputs PIXELS and SIZES, as ``write_pixels`` wrote them; none when neither was sent.

    Raises:
        InvalidRequest: only one was sent, or the sizes are not those of the pixels.
    """
    if all(pb_utils.get_input_tensor_by_name(request, name) is None for name in ("PIXELS", "SIZES")):
        return []
    pixels, sizes = read_array(request, "PIXELS"), read_array(request, "SIZES").astype(np.int64)
    if (sizes < 1).any():
        raise InvalidRequest("SIZES", sizes.tolist(), "must be positive")
    ends = sizes.prod(axis=1).cumsum()
    if (ends[-1] if len(ends) else 0) != len(pixels):
        raise InvalidRequest("SIZES", sizes.tolist(), f"must be the sizes of the {len(pixels)} pixels sent")
    parts = np.split(pixels, ends[:-1]) if len(ends) else []
    return [part.reshape(*size, 3) for part, size in zip(parts, sizes, strict=True)]
