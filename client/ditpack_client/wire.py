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
from ditpack_client.events import Event, Finished, Preview, Queued, Step
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
    priority: int | None


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
    "priority": ("PRIORITY", "INT32"),
}


Inputs = dict[str, tuple[str, np.ndarray[Any, Any]]]


def input_tensors(request: ImageRequest) -> Inputs:
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


def image_list(images: ImageSource | Sequence[ImageSource]) -> Sequence[ImageSource]:
    """One image needs no list."""
    return [images] if isinstance(images, ImageSource) else images


def encode(protocol: ModuleType, request: ImageRequest) -> tuple[list[Any], list[Any]]:
    """``InferInput`` and ``InferRequestedOutput`` lists of ``protocol`` (tritonclient.http or tritonclient.grpc)."""
    picture = "PIXELS" if request.get("output_format") == "raw" else "IMAGE"
    names = (picture, "SEED_USED", "INFO")
    return protocol_inputs(protocol, input_tensors(request)), [protocol.InferRequestedOutput(name) for name in names]


def encode_control(protocol: ModuleType, action: str, request_id: str | None = None) -> tuple[list[Any], list[Any]]:
    """The same for the model ``control``."""
    inputs = {"ACTION": ("BYTES", np.array([action.encode()], dtype=np.object_))}
    if request_id is not None:
        inputs["ID"] = ("BYTES", np.array([request_id.encode()], dtype=np.object_))
    return protocol_inputs(protocol, inputs), [protocol.InferRequestedOutput("ANSWER")]


def stream_tensors(request: ImageRequest, preview_every: int) -> Inputs:
    """``input_tensors`` for the model that streams; ``preview_every`` n: a preview after every n-th step."""
    inputs = input_tensors(request)
    if preview_every:
        inputs["PREVIEW_EVERY"] = ("INT32", _array("PREVIEW_EVERY", "INT32", preview_every))
    return inputs


def protocol_inputs(protocol: ModuleType, inputs: Inputs) -> list[Any]:
    """``InferInput``s of ``protocol``."""
    tensors = []
    for name, (datatype, array) in inputs.items():
        tensor = protocol.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def decode(tensors: Tensors, request: ImageRequest, model: str, request_id: str) -> ImageResult:
    """The image, seed and information of an answer.

    Raises:
        GenerationError: WITHHELD when a filter in the ensemble kept the picture back; INTERNAL when the answer is not
            what the wire table says.
    """
    output_format = request.get("output_format") or "png"
    seed = int(_output(tensors, "SEED_USED").item())
    info = _json(tensors, "INFO")
    reason = info.get("finish_reason", "stop")
    if reason != "stop":
        raise GenerationError("WITHHELD", f"the server made the picture and withholds it: {reason}")
    if output_format == "raw":
        pixels = Image.fromarray(_output(tensors, "PIXELS"))
        return ImageResult(pixels, seed, info, b"", output_format, model, request_id)
    image, data = _picture(tensors)
    return ImageResult(image, seed, info, data, output_format, model, request_id)


def decode_event(tensors: Tensors, request: ImageRequest, model: str, request_id: str) -> Event | None:
    """One response of a stream; None for a kind of event that is not known here.

    Raises:
        GenerationError: as ``decode``.
    """
    told = _json(tensors, "EVENT")
    try:
        match told["event"]:
            case "queued":
                return Queued(request_id, told["position"])
            case "step":
                return Step(request_id, told["step"], told["steps"], told["seconds_per_step"], told["remaining_s"])
            case "preview":
                return Preview(request_id, told["step"], told["steps"], *_picture(tensors))
            case "image":
                return Finished(request_id, decode(tensors, request, model, request_id))
    except KeyError as error:
        raise GenerationError("INTERNAL", f"the server's EVENT has no {error}") from None
    return None


def decode_control(tensors: Tensors) -> dict[str, Any]:
    """What ``control`` answered."""
    return _json(tensors, "ANSWER")


def _picture(tensors: Tensors) -> tuple[Image.Image, bytes]:
    data = bytes(_output(tensors, "IMAGE").item())
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except OSError as error:
        raise GenerationError("INTERNAL", f"the server's IMAGE is no image: {error}") from None
    return image, data


def _json(tensors: Tensors, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(_output(tensors, name).item()))
    except (ValueError, TypeError) as error:
        raise GenerationError("INTERNAL", f"the server's {name} is no JSON: {error}") from None


def _output(tensors: Tensors, name: str) -> np.ndarray[Any, Any]:
    array = tensors.as_numpy(name)
    if array is None or array.size == 0:
        raise GenerationError("INTERNAL", f"the server's answer has no {name}")
    return array
