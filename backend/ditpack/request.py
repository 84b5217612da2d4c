"""The one resolver: what arrived becomes a validated ``Request`` or an ``InvalidRequest`` that says why not.

``prepare`` resolves what the client sent; ``dit`` and ``vae_decoder`` resolve the JSON that ``prepare`` passed on,
by the same rules, so a hand-made call to an inner model meets the same checks.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ditpack.errors import InvalidRequest
from ditpack.fields import Field, check_known, integer, number, text

MAX_SIDE = 16368  # pixels; WebP ends at 16383
_MAX_DRAWN_SEED = 2**53  # beyond it a seed would not survive a JSON number in JavaScript
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
    priority: int
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

_SIZE = (
    "pixels: a multiple of 16 of at least 64 (a checkpoint may say otherwise), never rounded; width × height at most "
    "the model parameter `max_pixels` (4194304)"
)
# The names on the wire; also those of the JSON that models pass to each other.
COMMON_FIELDS = {
    "WIDTH": Field(unsent="the checkpoint's; in edits the last image's", about=_SIZE),
    "HEIGHT": Field(unsent="as `WIDTH`", about="as `WIDTH`"),
    "NUM_INFERENCE_STEPS": Field(default=50, low=1, high=200, about="denoising steps"),
    "SEED": Field(unsent="drawn", low=0, high=2**63 - 1, about="the same seed gives the same picture"),
    "OUTPUT_FORMAT": Field(
        default="png", choices=("png", "jpeg", "webp", "raw"), about="`raw`: the pixels as a tensor, no file"
    ),
    "RESPONSE_FORMAT": Field(
        default="bytes", choices=("bytes", "b64_json"), about="`b64_json`: base64, for JSON over `/generate`"
    ),
    "DEADLINE_MS": Field(
        unsent="none", low=1, high=2**31 - 1, about="milliseconds after which the request is dropped at the next step"
    ),
    "PRIORITY": Field(
        default=2,
        low=1,
        high=3,
        about="at every step 1 goes before 2 and 2 before 3; Triton's own `priority` does nothing",
    ),
}
FIELDS = {
    "PROMPT": Field(
        unsent="required",
        about="not blank; at most `max_prompt_tokens` (1024) tokens, counted without the template; longer is refused, "
        "not cut",
    ),
    "NEGATIVE_PROMPT": Field(
        default=DEFAULT_NEGATIVE_PROMPT, about="as long as `PROMPT` may be; has no effect without guidance"
    ),
    "TRUE_CFG_SCALE": Field(default=4.0, low=1, about="1 turns guidance off and halves the work"),
    **COMMON_FIELDS,
}
STREAM_FIELDS = {
    **FIELDS,
    "PREVIEW_EVERY": Field(
        default=0,
        low=0,
        high=2**31 - 1,
        about="0: no previews; n: a small JPEG of what the image is going to be, after every n-th step",
    ),
}
SHORTEST_ID = 16  # characters: what is shorter, other clients could guess
CONTROL_FIELDS = {
    "ACTION": Field(
        unsent="required",
        choices=("cancel", "status"),
        about="stop the request that was sent with this id; or say how the engines are",
    ),
    "ID": Field(unsent="none", about=f"for `cancel`, required: the request's id, of at least {SHORTEST_ID} characters"),
}
_REFERENCES = "REFERENCES"  # what became of the wire's IMAGES, in that JSON only


def resolve(values: Mapping[str, Any], limits: Limits) -> ImageRequest:
    """Validate ``values`` (wire name → scalar, str or UTF-8 bytes; absent or None = not sent) and fill in defaults.

    "REFERENCES" is a list of objects with the fields of ``Reference``. The size that is left out is then that of the
    last one, as in ``QwenImageEditPlusPipeline``.

    Raises:
        InvalidRequest: naming the field, its value and what is allowed.
    """
    check_known(values, (*FIELDS, _REFERENCES))
    prompt = text(values, "PROMPT", FIELDS["PROMPT"])
    if prompt is None:
        raise InvalidRequest("PROMPT", None, "is required")
    if not prompt.strip():
        raise InvalidRequest("PROMPT", prompt, "must not be blank")

    scale = number(values, "TRUE_CFG_SCALE", FIELDS["TRUE_CFG_SCALE"])
    negative = text(values, "NEGATIVE_PROMPT", FIELDS["NEGATIVE_PROMPT"])

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


def resolve_common(values: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """The fields of ``Request`` from those of ``values`` that are COMMON_FIELDS, validated and with defaults filled in.

    Raises:
        InvalidRequest: as ``resolve``.
    """
    width = _size(values, "WIDTH", limits.default_width, limits)
    height = _size(values, "HEIGHT", limits.default_height, limits)
    if width * height > limits.max_pixels:
        raise InvalidRequest("WIDTH x HEIGHT", f"{width}x{height}", f"must not exceed {limits.max_pixels} pixels")
    seed = integer(values, "SEED", COMMON_FIELDS["SEED"])
    return {
        "width": width,
        "height": height,
        "num_inference_steps": integer(values, "NUM_INFERENCE_STEPS", COMMON_FIELDS["NUM_INFERENCE_STEPS"]),
        "seed": secrets.randbelow(_MAX_DRAWN_SEED) if seed is None else seed,
        "output_format": text(values, "OUTPUT_FORMAT", COMMON_FIELDS["OUTPUT_FORMAT"]),
        "response_format": text(values, "RESPONSE_FORMAT", COMMON_FIELDS["RESPONSE_FORMAT"]),
        "deadline_ms": integer(values, "DEADLINE_MS", COMMON_FIELDS["DEADLINE_MS"]),
        "priority": integer(values, "PRIORITY", COMMON_FIELDS["PRIORITY"]),
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


def _size(values: Mapping[str, Any], name: str, default: int, limits: Limits) -> int:
    field = dataclasses.replace(
        COMMON_FIELDS[name],
        default=default,
        low=limits.min_size,
        high=min(MAX_SIDE, limits.max_pixels // limits.min_size),
    )
    value = integer(values, name, field) or default
    if value % limits.size_multiple:
        raise InvalidRequest(name, value, f"must be a multiple of {limits.size_multiple}; sizes are never rounded")
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
        side = Field(default=1, low=limits.size_multiple, high=MAX_SIDE, about="")  # 1: no multiple
        width, height = (integer(entry, name, side) or 1 for name in ("width", "height"))
        if width % limits.size_multiple or height % limits.size_multiple:
            raise InvalidRequest(_REFERENCES, entry, f"sizes must be multiples of {limits.size_multiple}")
        references.append(Reference(width, height, entry["source"]))
    return tuple(references)
