"""perf_analyzer's input file: requests of mixed sizes, seeds and prompts; edits bring images."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

# Qwen-Image's official sizes: 1:1, 16:9, 9:16, 4:3, 3:4, 3:2, 2:3.
OFFICIAL_SIZES = ((1328, 1328), (1664, 928), (928, 1664), (1472, 1104), (1104, 1472), (1584, 1056), (1056, 1584))
_PROMPTS = (
    "a red apple on a blue background",
    "a lighthouse on a cliff at dusk, waves breaking below, photograph, soft light from the left",
    "two pink hearts",
    "an old bookshop in the rain, its sign says OPEN, reflections on the wet street, oil painting",
)
_EDITS = ("make it snow", "turn the sky into an evening sky and keep everything else as it is")


def requests(
    sizes: Sequence[tuple[int, int]], steps: int, guidance: float | None, inputs: Sequence[str], images: int = 1
) -> dict[str, Any]:
    """The file's content: each size with each prompt, in an order that mixes them, each with a seed of its own.

    ``inputs`` are those of the model; one with IMAGES is given ``images`` pictures with each request. Answers are asked
    for as base64, since perf_analyzer writes them to its export as text.
    """
    prompts = _EDITS if "IMAGES" in inputs else _PROMPTS
    data = []
    for number in range(len(sizes) * len(prompts)):
        width, height = sizes[number % len(sizes)]
        request: dict[str, Any] = {
            "PROMPT": [prompts[number // len(sizes)]],
            "WIDTH": [width],
            "HEIGHT": [height],
            "NUM_INFERENCE_STEPS": [steps],
            "SEED": [number],
            "OUTPUT_FORMAT": ["webp"],
            "RESPONSE_FORMAT": ["b64_json"],
        }
        if guidance is not None:
            request["TRUE_CFG_SCALE"] = [guidance]
        if "IMAGES" in inputs:
            pictures = [_picture(width, height, number * images + index) for index in range(images)]
            request["IMAGES"] = {"content": pictures, "shape": [images]}
        data.append({name: value for name, value in request.items() if name in inputs})
    return {"data": data}


def _picture(width: int, height: int, seed: int) -> str:
    """A smooth picture, as base64 of a WebP file: noise would be larger than any photograph."""
    corners = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC).save(buffer, format="webp")
    return base64.b64encode(buffer.getvalue()).decode()
