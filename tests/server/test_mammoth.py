"""The ensemble mammoth_moda2 in a real tritonserver: answers of the autoregressive stage in, images out."""

from __future__ import annotations

import io
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from server_tools import Caller, assert_same_picture, code, info, metric, outcomes, serving
from tritonclient.utils import InferenceServerException

from ditpack.models.tiny_mammoth import LLM_WIDTH
from ditpack.tritonserver.launch import TritonServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]

SIZES = [(64, 64), (32, 96), (96, 32), (48, 80), (128, 64), (64, 128), (32, 32), (96, 96)]


@pytest.fixture(scope="module")
def mammoth(mammoth_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serving(mammoth_checkpoint, tmp_path_factory.mktemp("mammoth") / "tritonserver.log") as started:
        yield started


@pytest.fixture(params=["http", "grpc"])
def caller(request: pytest.FixtureRequest, mammoth: TritonServer) -> Iterator[Caller]:
    opened = Caller(mammoth, request.param)
    yield opened
    opened.close()


def wire(index: int = 0, **changes: Any) -> dict[str, Any]:
    """The tensors of a request; each index is another answer, size, step count and guidance."""
    width, height = SIZES[index % len(SIZES)]
    text, visual = 3 + 5 * index, 1 + 9 * index
    states = np.random.default_rng(index).standard_normal((text + visual, LLM_WIDTH)).astype(np.float32)
    low = 0.1 * (index % 4)
    values: dict[str, Any] = {
        "HIDDEN_STATES": states,
        "TOKEN_IDS": np.array([*range(text), *range(1000, 1000 + visual)]),
        "ANSWER_START": np.array([text], np.int32),
        "WIDTH": np.array([width], np.int32),
        "HEIGHT": np.array([height], np.int32),
        "NUM_INFERENCE_STEPS": np.array([20 + 3 * index], np.int32),
        "GUIDANCE_SCALE": np.array([1.0 + index], np.float32),
        "CFG_RANGE": np.array([low, 1 - low]),
        "SEED": np.array([index]),
        "OUTPUT_FORMAT": np.array([b"raw"], np.object_),
    }
    values |= changes
    return {name: value for name, value in values.items() if value is not None}


def ask(caller: Caller, values: dict[str, Any]) -> dict[str, Any]:
    return caller.infer(values, model="mammoth_moda2")


def test_only_this_familys_models_are_served(mammoth: TritonServer) -> None:
    assert mammoth.models == ["control", "mammoth_dit", "mammoth_moda2", "mammoth_prepare", "mammoth_vae_decoder"]


def test_an_answer_becomes_a_picture(caller: Caller) -> None:
    made = ask(caller, wire(SEED=None, OUTPUT_FORMAT=None, CFG_RANGE=None, GUIDANCE_SCALE=None))
    image = Image.open(io.BytesIO(made["IMAGE"].item()))
    assert (image.format, image.size) == ("PNG", (64, 64))
    resolved = info(made)["request"]
    assert (resolved["guidance_scale"], resolved["cfg_range"]) == (9.0, [0.0, 1.0])
    assert resolved["seed"] == made["SEED_USED"].item()


def test_shared_steps_change_no_picture(mammoth: TritonServer) -> None:
    """Eight at once, of mixed sizes, steps, guidance, cfg_range and lengths, against each alone."""
    callers = [Caller(mammoth, "grpc") for _ in SIZES]
    alone = [ask(callers[0], wire(index)) for index in range(len(SIZES))]
    before = metric(mammoth, "ditpack_shared_steps_total")
    with ThreadPoolExecutor(len(SIZES)) as pool:
        together = list(pool.map(ask, callers, map(wire, range(len(SIZES)))))
    assert metric(mammoth, "ditpack_shared_steps_total") > before
    for index, (one, shared) in enumerate(zip(alone, together, strict=True)):
        assert info(shared)["steps"] == 20 + 3 * index
        assert one["PIXELS"].std() > 5
        assert_same_picture(shared["PIXELS"], one["PIXELS"])
    for opened in callers:
        opened.close()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"HIDDEN_STATES": None}, "HIDDEN_STATES = None: is required"),
    ({"TOKEN_IDS": np.arange(4)}, "visual token"),
    ({"ANSWER_START": np.array([5], np.int32)}, "ANSWER_START = 5: must be between 0 and 4"),
    ({"CFG_RANGE": np.array([0.6, 0.5])}, "CFG_RANGE = [0.6, 0.5]"),
    ({"HIDDEN_STATES": np.zeros((4, 3), np.float32)}, "HIDDEN_STATES = [4, 3]"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_request_is_refused_by_name(
    caller: Caller, mammoth: TritonServer, change: dict[str, Any], message: str
) -> None:
    before = outcomes(mammoth)
    with pytest.raises(InferenceServerException) as refused:
        ask(caller, wire(**change))
    assert code(refused.value) == "INVALID_ARG"
    assert message in str(refused.value)
    assert outcomes(mammoth)["invalid"] == before["invalid"] + 1
    assert ask(caller, wire())["PIXELS"].shape == (64, 64, 3)


def test_models_cannot_be_unloaded_by_a_client(mammoth: TritonServer) -> None:
    url = f"{mammoth.http_url}/v2/repository/models/mammoth_dit/unload"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(urllib.request.Request(url, b"{}", method="POST"), timeout=10)
    assert refused.value.code == 403
    assert "restricted" in json.dumps(refused.value.read().decode())
