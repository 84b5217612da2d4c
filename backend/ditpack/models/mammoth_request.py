"""The resolver of MammothModa2: the fields that are its own, and where each may come from."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ditpack.errors import InvalidRequest
from ditpack.fields import Field, check_known, number, text
from ditpack.request import COMMON_FIELDS, Limits, Request, resolve_common

# Wire field → its name in EXTRA_ARGS and ADDITIONAL_INFORMATION.
_KEYS = {
    "GUIDANCE_SCALE": "text_guidance_scale",
    "CFG_RANGE": "cfg_range",
    "NUM_INFERENCE_STEPS": "num_inference_steps",
}
_OUTPUTS_KEY = "num_outputs_per_prompt"

_SETTINGS = "JSON object with any of " + ", ".join(f"`{key}`" for key in _KEYS.values())

# What the autoregressive stage hands over; ``mammoth_conditions`` has the rules.
STATES = {
    "HIDDEN_STATES": Field(
        unsent="required",
        about="`[T, H]`: the language model's last state of every token, question and answer; H is its width",
    ),
    "TOKEN_IDS": Field(unsent="required", about="`[T]`: the ids of the same tokens"),
    "ANSWER_START": Field(
        unsent="required", about="0 … T: where the answer begins; it must hold at least one visual token"
    ),
}
FIELDS = {
    "GUIDANCE_SCALE": Field(default=9.0, low=0, about="up to 1 means no guidance"),
    "CFG_RANGE": Field(
        default=(0.0, 1.0),
        about="0 ≤ first ≤ second ≤ 1: guidance is active in step i of N where first ≤ i / N ≤ second",
    ),
    "EXTRA_ARGS": Field(unsent="none", about=f"{_SETTINGS}: goes before the inputs of its own"),
    "ADDITIONAL_INFORMATION": Field(
        unsent="none", about=f"{_SETTINGS}, as the upstream stage suggests them: counts where nothing else is sent"
    ),
    **COMMON_FIELDS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MammothRequest(Request):
    """One image to make from an answer of the autoregressive stage."""

    guidance_scale: float
    cfg_range: tuple[float, float]  # shares of the steps, both ends included

    def guided_at(self, step: int) -> bool:
        """Whether the request has an unconditional row in ``step``, counted from 0."""
        low, high = self.cfg_range
        return self.guidance_scale > 1 and low <= step / self.num_inference_steps <= high


def resolve(values: Mapping[str, Any], limits: Limits) -> MammothRequest:
    """Validate ``values`` and fill in defaults, as ``request.resolve`` does for a prompt.

    A setting counts from the first of: EXTRA_ARGS, its own field, ADDITIONAL_INFORMATION (what the autoregressive stage
    suggests), the default.

    Raises:
        InvalidRequest: naming the field, its value and what is allowed.
    """
    check_known(values, tuple(FIELDS))
    extra = _settings(values, "EXTRA_ARGS", {_OUTPUTS_KEY})
    suggested = _settings(values, "ADDITIONAL_INFORMATION", set())
    if extra.get(_OUTPUTS_KEY, 1) != 1:
        raise InvalidRequest(
            f"EXTRA_ARGS {_OUTPUTS_KEY}", extra[_OUTPUTS_KEY], "must be 1; one request makes one image"
        )
    chosen = dict(values)
    for field, key in _KEYS.items():
        sources = (extra.get(key), values.get(field), _first(suggested.get(key), field))
        chosen[field] = next((value for value in sources if value is not None), None)

    return MammothRequest(
        guidance_scale=number(chosen, "GUIDANCE_SCALE", FIELDS["GUIDANCE_SCALE"]),
        cfg_range=_cfg_range(chosen["CFG_RANGE"]),
        **resolve_common(chosen, limits),
    )


def _settings(values: Mapping[str, Any], field: str, more: set[str]) -> dict[str, Any]:
    """The JSON object in ``field``; its keys must be known."""
    value = text(values, field, FIELDS[field])
    if value is None:
        return {}
    try:
        settings = json.loads(value)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise InvalidRequest(field, value, "must be a JSON object")
    known = {*_KEYS.values(), *more}
    for key in settings:
        if key not in known:
            raise InvalidRequest(f"{field} {key}", settings[key], f"unknown key; known are {', '.join(sorted(known))}")
    return settings


def _first(value: Any, field: str) -> Any:
    """The autoregressive stage wraps single values in a list."""
    return value[0] if field != "CFG_RANGE" and isinstance(value, list) and len(value) == 1 else value


def _cfg_range(value: Any) -> tuple[float, float]:
    low, high = FIELDS["CFG_RANGE"].default
    if value is None:
        return low, high
    allowed = "must be two numbers with 0 <= first <= second <= 1"
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise InvalidRequest("CFG_RANGE", value, allowed)
    if any(isinstance(end, bool) or not isinstance(end, numbers.Real) for end in value):
        raise InvalidRequest("CFG_RANGE", value, allowed)
    low, high = map(float, value)
    if not 0 <= low <= high <= 1:
        raise InvalidRequest("CFG_RANGE", value, allowed)
    return low, high
