"""Triton tensors ↔ Python values, strictly: Triton itself passes a wrong output name, dtype or shape on in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from ditpack.errors import InvalidRequest

Array = npt.NDArray[Any]


def read_scalar(request: pb_utils.InferenceRequest, name: str) -> Any:
    """The one element of input ``name``: bytes, int or float; None when the input was not sent.

    Raises:
        InvalidRequest: the tensor has no or several elements.
    """
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    array = tensor.as_numpy()
    if array.size != 1:
        raise InvalidRequest(name, list(array.shape), "must have exactly one element; one request makes one image")
    return array.reshape(-1)[0] if array.dtype == np.object_ else array.item()


def read_bytes(request: pb_utils.InferenceRequest, name: str) -> bytes:
    """The one element of the STRING input ``name``.

    Raises:
        InvalidRequest: the input is missing, or has no or several elements.
    """
    value = read_scalar(request, name)
    if not isinstance(value, bytes):
        raise InvalidRequest(name, value, "is required, as one string")
    return value


def read_strings(request: pb_utils.InferenceRequest, name: str) -> list[bytes]:
    """All elements of the STRING input ``name``; none when it was not sent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else [bytes(value) for value in tensor.as_numpy().reshape(-1)]


def read_array(request: pb_utils.InferenceRequest, name: str) -> Array:
    """A copy of input ``name`` without its batch dimension (inputs are views of memory that Triton takes back).

    Raises:
        InvalidRequest: the input is missing, or carries a batch other than 1.
    """
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise InvalidRequest(name, None, "is required")
    array = tensor.as_numpy()
    if array.ndim == 0 or array.shape[0] != 1:
        raise InvalidRequest(name, list(array.shape), "must have a first dimension of 1; one request makes one image")
    return np.array(array[0], copy=True)


def text(value: str | bytes) -> Array:
    """A STRING[1] output."""
    return np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)


class Outputs:
    """Builds a model's responses and holds them to its ``config.pbtxt``."""

    def __init__(self, model_config: Mapping[str, Any]) -> None:
        self._declared = {
            output["name"]: (
                np.dtype(pb_utils.triton_string_to_numpy(output["data_type"])),
                tuple(int(size) for size in output["dims"]),
            )
            for output in model_config["output"]
        }

    def response(self, values: Mapping[str, Array], requested: Sequence[str]) -> pb_utils.InferenceResponse:
        """The response with those of ``values`` (name → array without batch dimension) that were ``requested``.

        Raises:
            ValueError: a value that the config does not declare so, or a requested one that is missing. That is a bug
                of ours, which the client sees as an internal error instead of as a wrong tensor.
        """
        for name in requested:
            if name not in values:
                raise ValueError(f"output {name} was requested but not made")
        for name, array in values.items():
            self._check(name, array)
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor(name, np.ascontiguousarray(array[np.newaxis]))
                for name, array in values.items()
                if name in requested
            ]
        )

    def _check(self, name: str, array: Array) -> None:
        if name not in self._declared:
            raise ValueError(f"output {name} is not in config.pbtxt; declared are {', '.join(self._declared)}")
        dtype, dims = self._declared[name]
        fits = len(dims) == array.ndim and all(d in (-1, n) for d, n in zip(dims, array.shape, strict=True))
        if array.dtype != dtype or not fits:
            raise ValueError(
                f"output {name} is {array.dtype}{list(array.shape)}, config.pbtxt says {dtype}{list(dims)}"
            )
