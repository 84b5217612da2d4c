"""The models behind ``prepare``, called one by one, as a hand-made call would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from server_tools import DTYPES, Caller, Values

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DitInputs:
    """What ``prepare`` and ``text_encoder`` make of a request, with the batch dimension that ``dit`` has."""

    request: Array  # STRING [1, 1]
    embeds: Array  # FP32 [1, L, D]
    negative_embeds: Array

    def values(self, **changes: Array) -> dict[str, Array]:
        values = {"REQUEST": self.request, "EMBEDS": self.embeds, "NEGATIVE_EMBEDS": self.negative_embeds}
        return {**values, **changes}


def dit_inputs(caller: Caller, request: Values) -> DitInputs:
    batched = {name: np.array([[value]], DTYPES[name]) for name, value in request.items()}
    prepared = caller.infer(batched, model="prepare")
    positive, negative = (
        caller.infer({"INPUT_IDS": prepared[name]}, model="text_encoder")["EMBEDS"]
        for name in ("INPUT_IDS", "NEGATIVE_INPUT_IDS")
    )
    return DitInputs(prepared["REQUEST"], positive, negative)


def text(value: str | bytes) -> Array:
    """STRING [1, 1]"""
    return np.array([[value]], np.object_)
