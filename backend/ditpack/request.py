"""The one resolver: what arrived becomes a validated ``Request`` or an ``InvalidRequest`` that says why not.

``prepare`` resolves what the client sent; ``dit`` and ``vae_decoder`` resolve the JSON that ``prepare`` passed on,
by the same rules, so a hand-made call to an inner model meets the same checks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ditpack.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_STEPS = 200
MAX_SIDE = 16368  # pixels; WebP ends at 16383
_MAX_DRAWN_SEED = 2**53  # beyond it a seed would not survive a JSON number in JavaScript
MAX_DEADLINE_MS = 2**31 - 1
OUTPUT_FORMATS = ("png", "jpeg", "webp", "raw")
RESPONSE_FORMATS = ("bytes", "b64_json")
DEFAULT_STEPS = 50
DEFAULT_TRUE_CFG_SCALE = 4.0
DEFAULT_NEGATIVE_PROMPT = " "


@dataclass(frozen=True, slots=True)
class Limits:
    """What one deployment allows. Sizes are in pixels. ``max_references`` 0: the checkpoint cannot edit images."""

    default_width: int
    default_height: int
    size_multiple: int = 16
    min_size: int = 64
    max_pixels: int = 2048 * 2048
    max_references: int = 0


@dataclass(frozen=True, slots=True)
class Reference:
    """An image to edit: its size as the VAE encodes it, in pixels, and what was sent and done to it, for people."""

    width: int
    height: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One image to make, with nothing left to decide: what the requests of all families have.

    ``accepted_ns`` is ``time.monotonic_ns()`` at admission; the processes of one host share that clock.
    """

    width: int
    height: int
    num_inference_steps: int
    seed: int
    output_format: str
    response_format: str
    deadline_ms: int | None
    accepted_ns: int

    @property
    def expired(self) -> bool:
        """Whether its deadline, if it has one, has passed."""
        if self.deadline_ms is None:
            return False
        return time.monotonic_ns() >= self.accepted_ns + self.deadline_ms * 1_000_000

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest(Request):
    """One image to make from a prompt.

    ``negative_prompt`` is None exactly when ``true_cfg_scale`` is 1 (no unconditional row).
    """

    prompt: str
    negative_prompt: str | None
    true_cfg_scale: float
    references: tuple[Reference, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, ``references`` only where there are any."""
        values = dataclasses.asdict(self)
        if not self.references:
            del values["references"]
        return values

    @property
    def guided(self) -> bool:
        """Whether the request has an unconditional row."""
        return self.true_cfg_scale > 1


RequestT = TypeVar("RequestT", bound=Request)

# The names on the wire; also those of the JSON that models pass to each other.
COMMON_FIELDS = (
    "WIDTH",
    "HEIGHT",
    "NUM_INFERENCE_STEPS",
    "SEED",
    "OUTPUT_FORMAT",
    "RESPONSE_FORMAT",
    "DEADLINE_MS",
)
FIELDS = ("PROMPT", "NEGATIVE_PROMPT", "TRUE_CFG_SCALE", *COMMON_FIELDS)
_REFERENCES = "REFERENCES"  # what became of the wire's IMAGES, in that JSON only


def resolve(values: Mapping[str, Any], limits: Limits) -> ImageRequest:
    """Validate ``values`` (wire name → scalar, str or UTF-8 bytes; absent or None = not sent) and fill in defaults.

    "REFERENCES" is a list of objects with the fields of ``Reference``. The size that is left out is then that of the
    last one, as in ``QwenImageEditPlusPipeline``.

    Raises:
        InvalidRequest: naming the field, its value and what is allowed.
    """
    check_known(values, (*FIELDS, _REFERENCES))
    prompt = text(values, "PROMPT", None)
    if prompt is None:
        raise InvalidRequest("PROMPT", None, "is required")
    if not prompt.strip():
        raise InvalidRequest("PROMPT", prompt, "must not be blank")

    scale = number(values, "TRUE_CFG_SCALE", DEFAULT_TRUE_CFG_SCALE)
    if not (math.isfinite(scale) and scale >= 1):
        raise InvalidRequest("TRUE_CFG_SCALE", scale, "must be a finite number of at least 1 (1 turns guidance off)")
    negative = text(values, "NEGATIVE_PROMPT", DEFAULT_NEGATIVE_PROMPT)

    references = _references(values.get(_REFERENCES), limits)
    if references:
        last = references[-1]
        limits = dataclasses.replace(limits, default_width=last.width, default_height=last.height)
    return ImageRequest(
        prompt=prompt,
        negative_prompt=negative if scale > 1 else None,
        true_cfg_scale=scale,
        references=references,
        **resolve_common(values, limits),
    )


def check_known(values: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    """Raise InvalidRequest for a field that is none of ``fields``."""
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise InvalidRequest(unknown[0], values[unknown[0]], f"unknown field; known are {', '.join(fields)}")


def resolve_common(values: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """The fields of ``Request`` from those of ``values`` that are COMMON_FIELDS, validated and with defaults filled in.

    Raises:
        InvalidRequest: as ``resolve``.
    """
    width = _size(values, "WIDTH", limits.default_width, limits)
    height = _size(values, "HEIGHT", limits.default_height, limits)
    if width * height > limits.max_pixels:
        raise InvalidRequest("WIDTH x HEIGHT", f"{width}x{height}", f"must not exceed {limits.max_pixels} pixels")
    deadline = values.get("DEADLINE_MS")
    return {
        "width": width,
        "height": height,
        "num_inference_steps": _integer(values, "NUM_INFERENCE_STEPS", DEFAULT_STEPS, 1, MAX_STEPS),
        "seed": _integer(values, "SEED", secrets.randbelow(_MAX_DRAWN_SEED), 0, MAX_SEED),
        "output_format": _choice(values, "OUTPUT_FORMAT", OUTPUT_FORMATS),
        "response_format": _choice(values, "RESPONSE_FORMAT", RESPONSE_FORMATS),
        "deadline_ms": None if deadline is None else _integer(values, "DEADLINE_MS", 0, 1, MAX_DEADLINE_MS),
        "accepted_ns": time.monotonic_ns(),
    }


Resolver = Callable[[Mapping[str, Any], Limits], RequestT]


def resolve_json(text: str | bytes, limits: Limits, resolver: Resolver[RequestT]) -> RequestT:
    """``resolver``, a family's, for the REQUEST tensor that ``prepare`` passes to the models behind it.

    An ``accepted_ns`` that lies in the future (a hand-made request, or one from another host) counts as now.

    Raises:
        InvalidRequest: as ``resolve``, and when ``text`` is not a JSON object.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("REQUEST", text, "must be the JSON object that the model 'prepare' writes") from None
    if not isinstance(values, dict):
        raise InvalidRequest("REQUEST", text, "must be the JSON object that the model 'prepare' writes")
    accepted = values.pop("accepted_ns", None)
    request = resolver({name.upper(): value for name, value in values.items()}, limits)
    if isinstance(accepted, int) and 0 <= accepted <= request.accepted_ns:
        return dataclasses.replace(request, accepted_ns=accepted)
    return request


def text(values: Mapping[str, Any], field: str, default: str | None) -> str | None:
    value = values.get(field)
    if value is None:
        return default
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest(field, value, "must be valid UTF-8") from None
    if not isinstance(value, str):
        raise InvalidRequest(field, value, "must be a string")
    return value


def number(values: Mapping[str, Any], field: str, default: float) -> float:
    value = values.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequest(field, value, "must be a number")
    return float(value)


def _integer(values: Mapping[str, Any], field: str, default: int, low: int, high: int) -> int:
    value = values.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequest(field, value, "must be an integer")
    number = int(value)
    if not low <= number <= high:
        raise InvalidRequest(field, number, f"must be between {low} and {high}")
    return number


def _size(values: Mapping[str, Any], field: str, default: int, limits: Limits) -> int:
    high = min(MAX_SIDE, limits.max_pixels // limits.min_size)
    value = _integer(values, field, default, limits.min_size, high)
    if value % limits.size_multiple:
        raise InvalidRequest(field, value, f"must be a multiple of {limits.size_multiple}; sizes are never rounded")
    return value


def _references(value: Any, limits: Limits) -> tuple[Reference, ...]:
    if not value:
        return ()
    if limits.max_references == 0:
        raise InvalidRequest(_REFERENCES, value, "this checkpoint cannot edit images")
    if not isinstance(value, list) or len(value) > limits.max_references:
        raise InvalidRequest(_REFERENCES, value, f"must be a list of 1 … {limits.max_references} images")
    references = []
    for entry in value:
        if not isinstance(entry, dict) or set(entry) != set(Reference.__slots__) or type(entry["source"]) is not str:
            raise InvalidRequest(_REFERENCES, entry, "must have width, height and source")
        width, height = (_integer(entry, side, 0, limits.size_multiple, MAX_SIDE) for side in ("width", "height"))
        if width % limits.size_multiple or height % limits.size_multiple:
            raise InvalidRequest(_REFERENCES, entry, f"sizes must be multiples of {limits.size_multiple}")
        references.append(Reference(width, height, entry["source"]))
    return tuple(references)


def _choice(values: Mapping[str, Any], field: str, allowed: tuple[str, ...]) -> str:
    value = text(values, field, allowed[0])
    if value not in allowed:
        raise InvalidRequest(field, value, f"must be one of {', '.join(allowed)}")
    return value
