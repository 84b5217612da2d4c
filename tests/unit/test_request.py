"""The resolver: defaults, and every rule with an error that names the field, the value and what is allowed."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest

from ditpack.errors import InvalidRequest
from ditpack.request import FIELDS, Limits, resolve, resolve_json

LIMITS = Limits(default_width=128, default_height=96, max_pixels=1024 * 1024)


def test_only_a_prompt_is_needed() -> None:
    request = resolve({"PROMPT": b"a cat"}, LIMITS)
    assert (request.prompt, request.negative_prompt) == ("a cat", " ")
    assert (request.width, request.height, request.num_inference_steps, request.true_cfg_scale) == (128, 96, 50, 4.0)
    assert (request.output_format, request.response_format, request.deadline_ms) == ("png", "bytes", None)
    assert 0 <= request.seed < 2**53


def test_seeds_are_drawn_anew() -> None:
    assert resolve({"PROMPT": "x"}, LIMITS).seed != resolve({"PROMPT": "x"}, LIMITS).seed


def test_no_guidance_no_negative_prompt() -> None:
    request = resolve({"PROMPT": "x", "NEGATIVE_PROMPT": "blurry", "TRUE_CFG_SCALE": np.float32(1)}, LIMITS)
    assert request.negative_prompt is None
    assert not request.guided


BAD: list[tuple[str, Any, str]] = [
    ("PROMPT", None, "is required"),
    ("PROMPT", "", "must not be blank"),
    ("PROMPT", " \n\t ", "must not be blank"),
    ("PROMPT", b"\xff\xfe", "must be valid UTF-8"),
    ("PROMPT", 5, "must be a string"),
    ("NEGATIVE_PROMPT", b"\xc3", "must be valid UTF-8"),
    ("WIDTH", 0, "must be between 64 and 16368"),
    ("WIDTH", -64, "must be between 64 and 16368"),
    ("WIDTH", 65, "must be a multiple of 16"),
    ("HEIGHT", 100000, "must be between 64 and 16368"),
    ("HEIGHT", 16368, "must not exceed 1048576 pixels"),
    ("HEIGHT", 64.0, "must be an integer"),
    ("HEIGHT", True, "must be an integer"),
    ("NUM_INFERENCE_STEPS", 0, "must be between 1 and 200"),
    ("NUM_INFERENCE_STEPS", 1000, "must be between 1 and 200"),
    ("TRUE_CFG_SCALE", math.nan, "must be a finite number of at least 1"),
    ("TRUE_CFG_SCALE", math.inf, "must be a finite number of at least 1"),
    ("TRUE_CFG_SCALE", 0.5, "must be a finite number of at least 1"),
    ("TRUE_CFG_SCALE", "4", "must be a number"),
    ("SEED", -1, "must be between 0 and 9223372036854775807"),
    ("SEED", 2**63, "must be between 0 and 9223372036854775807"),
    ("OUTPUT_FORMAT", "gif", "must be one of png, jpeg, webp, raw"),
    ("RESPONSE_FORMAT", "url", "must be one of bytes, b64_json"),
    ("DEADLINE_MS", 0, "must be between 1 and 2147483647"),
    ("PRIORITY", 4, "must be between 1 and 3"),
    ("GUIDANCE_SCALE", 4.0, "unknown field"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), BAD)
def test_bad_values_are_named(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=allowed) as caught:
        resolve({"PROMPT": "x", "WIDTH": 128, field: value}, LIMITS)
    assert field in str(caught.value)
    if isinstance(value, int | float):
        assert str(value) in str(caught.value)


def test_every_field_of_the_wire_has_a_bad_value_above() -> None:
    assert {field for field, *_ in BAD} >= set(FIELDS)


def test_an_error_never_repeats_a_huge_value() -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve({"PROMPT": "x", "OUTPUT_FORMAT": "y" * 10_000_000}, LIMITS)
    assert len(str(caught.value)) < 300
    assert "10000000 characters" in str(caught.value)


def test_json_round_trip() -> None:
    request = resolve({"PROMPT": "snow ❄", "SEED": 2**63 - 1, "DEADLINE_MS": 500, "WIDTH": 64}, LIMITS)
    assert resolve_json(request.to_json(), LIMITS, resolve) == request


@pytest.mark.parametrize("text", ["", "[]", "nul", "3", b"\xff", "[" * 100_000])
def test_json_that_is_no_request(text: Any) -> None:
    with pytest.raises(InvalidRequest, match="REQUEST"):
        resolve_json(text, LIMITS, resolve)


def test_json_meets_the_same_rules() -> None:
    values = json.loads(resolve({"PROMPT": "x"}, LIMITS).to_json())
    with pytest.raises(InvalidRequest, match="WIDTH = 65"):
        resolve_json(json.dumps({**values, "width": 65}), LIMITS, resolve)


@pytest.mark.parametrize("accepted", [-5, 2**62, "yesterday", None, 1.5])
def test_an_impossible_acceptance_time_counts_as_now(accepted: Any) -> None:
    values = json.loads(resolve({"PROMPT": "x"}, LIMITS).to_json())
    before = time.monotonic_ns()
    request = resolve_json(json.dumps({**values, "accepted_ns": accepted}), LIMITS, resolve)
    assert before <= request.accepted_ns <= time.monotonic_ns()
