"""Requests to tensors and tensors to results: the one place that knows the wire, for all four transports."""

from __future__ import annotations

import io
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Required, TypedDict

import numpy as np
from PIL import Image

from ditpack_client.errors import GenerationError
from ditpack_client.result import ImageResult

ImageSource = bytes | str | Path | Image.Image  # an encoded image, the name of its file, or a PIL image


class Settings(TypedDict, total=False):
    """What may be set for one image. What is left out (or None) is not sent: the server fills it in."""

    negative_prompt: str | None
    width: int | None
    height: int | None
    num_inference_steps: int | None
    true_cfg_scale: float | None
    seed: int | None
    output_format: str | None
    deadline_ms: int | None


class ImageRequest(Settings, total=False):
    """The settings of one image and its prompt: an item of ``generate_many``."""

    prompt: Required[str]


class EditRequest(ImageRequest, total=False):
    """The same with the images to edit; ``generate_many`` takes both."""

    images: Required[Sequence[ImageSource]]


class Tensors(Protocol):
    """The answer of any of tritonclient's clients."""

    def as_numpy(self, name: str) -> np.ndarray[Any, Any] | None: ...


_INPUTS = {
    "images": ("IMAGES", "BYTES"),
    "prompt": ("PROMPT", "BYTES"),
    "negative_prompt": ("NEGATIVE_PROMPT", "BYTES"),
    "width": ("WIDTH", "INT32"),
    "height": ("HEIGHT", "INT32"),
    "num_inference_steps": ("NUM_INFERENCE_STEPS", "INT32"),
    "true_cfg_scale": ("TRUE_CFG_SCALE", "FP32"),
    "seed": ("SEED", "INT64"),
    "output_format": ("OUTPUT_FORMAT", "BYTES"),
    "deadline_ms": ("DEADLINE_MS", "INT32"),
}


def input_tensors(request: ImageRequest) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Wire name → (Triton data type, array of shape [1], of [n] for images) for every setting that is given.

    Raises:
        TypeError: for a setting that does not exist.
        GenerationError: INVALID_ARG for a value that its data type cannot hold, or a file that cannot be read.
    """
    given: Mapping[str, Any] = request
    unknown = sorted(set(given) - set(_INPUTS))
    if unknown:
        raise TypeError(f"unknown setting {unknown[0]!r}; known are {', '.join(_INPUTS)}")
    return {
        name: (datatype, _array(name, datatype, given[key]))
        for key, (name, datatype) in _INPUTS.items()
        if given.get(key) is not None
    }


def _array(name: str, datatype: str, value: Any) -> np.ndarray[Any, Any]:
    if name == "IMAGES":
        return np.array([*map(image_bytes, value), None], dtype=np.object_)[:-1]  # 1-D, whatever the bytes are
    try:
        if datatype == "BYTES":
            return np.array([value.encode("utf-8")], dtype=np.object_)
        if datatype == "FP32":
            return np.array([float(value)], dtype=np.float32)
        number, bounds = operator.index(value), np.iinfo(datatype.lower())  # index() refuses 65.5 where int() cuts it
        if not bounds.min <= number <= bounds.max:  # numpy 1 would wrap it round
            raise OverflowError
        return np.array([number], dtype=bounds.dtype)
    except (AttributeError, TypeError, ValueError, OverflowError):
        kind = "text" if datatype == "BYTES" else datatype
        raise GenerationError("INVALID_ARG", f"{name} = {str(value)[:60]!r}: is not {kind}") from None


def image_bytes(source: ImageSource) -> bytes:
    """``source`` as an image file's bytes. A PIL image becomes a PNG.

    Raises:
        GenerationError: INVALID_ARG when the file cannot be read.
    """
    if isinstance(source, Image.Image):
        buffer = io.BytesIO()
        source.save(buffer, format="PNG")
        return buffer.getvalue()
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise GenerationError("INVALID_ARG", f"IMAGES: cannot read {source}: {error.strerror or error}") from None


def encode(protocol: ModuleType, request: ImageRequest) -> tuple[list[Any], list[Any]]:
    """``InferInput`` and ``InferRequestedOutput`` lists of ``protocol`` (tritonclient.http or tritonclient.grpc)."""
    inputs = []
    for name, (datatype, array) in input_tensors(request).items():
        tensor = protocol.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    picture = "PIXELS" if request.get("output_format") == "raw" else "IMAGE"
    return inputs, [protocol.InferRequestedOutput(name) for name in (picture, "SEED_USED", "INFO")]


def decode(tensors: Tensors, request: ImageRequest, model: str) -> ImageResult:
    """The image, seed and information of an answer.

    Raises:
        GenerationError: WITHHELD when a filter in the ensemble kept the picture back; INTERNAL when the answer is not
            what the wire table says.
    """
    output_format = request.get("output_format") or "png"
    seed = int(_output(tensors, "SEED_USED").item())
    try:
        info = json.loads(_output(tensors, "INFO").item())
    except ValueError as error:
        raise GenerationError("INTERNAL", f"the server's INFO is no JSON: {error}") from None
    reason = info.get("finish_reason", "stop")
    if reason != "stop":
        raise GenerationError("WITHHELD", f"the server made the picture and withholds it: {reason}")
    if output_format == "raw":
        return ImageResult(Image.fromarray(_output(tensors, "PIXELS")), seed, info, b"", output_format, model)
    data = bytes(_output(tensors, "IMAGE").item())
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except OSError as error:
        raise GenerationError("INTERNAL", f"the server's IMAGE is no image: {error}") from None
    return ImageResult(image, seed, info, data, output_format, model)


def _output(tensors: Tensors, name: str) -> np.ndarray[Any, Any]:
    array = tensors.as_numpy(name)
    if array is None or array.size == 0:
        raise GenerationError("INTERNAL", f"the server's answer has no {name}")
    return array
