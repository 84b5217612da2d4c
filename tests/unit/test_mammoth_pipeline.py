"""The ensemble mammoth_moda2 on the tiny checkpoint, door by door, held to every config.pbtxt."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from fake_triton import MAMMOTH_MODELS, Answer, FakeEnsemble, FakeModel, import_model, triton_args
from mammoth_oracle import Oracle
from mammoth_tools import answer
from PIL import Image
from safetensors.torch import load_file

from ditpack.tritonserver.parameters import ParameterError

TYPES: dict[str, Any] = {
    "WIDTH": np.int32,
    "HEIGHT": np.int32,
    "NUM_INFERENCE_STEPS": np.int32,
    "ANSWER_START": np.int32,
    "GUIDANCE_SCALE": np.float32,
    "SEED": np.int64,
    "DEADLINE_MS": np.int32,
    "PRIORITY": np.int32,
}


def wire(text: int = 5, visual: int = 6, **values: Any) -> dict[str, np.ndarray]:
    """The tensors of a request by their lower-case names; None takes one away."""
    given = answer(text, visual)
    tensors: dict[str, Any] = {"hidden_states": given.states, "token_ids": given.ids, "answer_start": given.start}
    tensors |= {"width": 64, "height": 32, "num_inference_steps": 3, "seed": 7} | values
    result = {}
    for name, value in tensors.items():
        field = name.upper()
        if field == "CFG_RANGE":
            result[field] = np.array(value, np.float64)
        elif value is not None and not isinstance(value, np.ndarray):
            value = value.encode() if isinstance(value, str) else value
            result[field] = np.array([value], TYPES.get(field, np.object_))
        elif value is not None:
            result[field] = value
    return result


@pytest.fixture(scope="module")
def ensemble(mammoth_checkpoint: Path) -> Iterator[FakeEnsemble]:
    parameters = {"checkpoint": str(mammoth_checkpoint), "max_pixels": "65536"}
    models = {name: FakeModel(name, parameters) for name in MAMMOTH_MODELS}
    yield FakeEnsemble("mammoth_moda2", models)
    for name in ("mammoth_dit", "mammoth_vae_decoder"):
        models[name].instance.finalize()


def picture(given: Answer) -> Image.Image:
    assert given.code is None, given.message
    return Image.open(io.BytesIO(given.outputs["IMAGE"][0]))


def test_an_answer_becomes_a_picture(ensemble: FakeEnsemble) -> None:
    (made,) = ensemble.infer(wire(guidance_scale=3.5, cfg_range=[0.3, 0.7]))
    image = picture(made)
    assert (image.format, image.size, image.mode) == ("PNG", (64, 32), "RGB")
    assert made.outputs["SEED_USED"].tolist() == [7]
    info = json.loads(made.outputs["INFO"][0])
    assert info["request"] == {
        "width": 64,
        "height": 32,
        "num_inference_steps": 3,
        "guidance_scale": 3.5,
        "cfg_range": [0.3, 0.7],
        "seed": 7,
        "output_format": "png",
        "response_format": "bytes",
        "deadline_ms": None,
        "priority": 2,
    }
    assert info["steps"] == 3


def test_the_picture_is_the_references(ensemble: FakeEnsemble, mammoth_checkpoint: Path) -> None:
    """The plain loop, then diffusers' own AutoencoderKL."""
    (made,) = ensemble.infer(wire(output_format="raw", guidance_scale=2.5))
    oracle, given = Oracle(mammoth_checkpoint), answer(5, 6)
    vae = AutoencoderKL.from_config(oracle.config["gen_vae_config"]).eval()
    weights: dict[str, torch.Tensor] = {}
    for file in mammoth_checkpoint.glob("*.safetensors"):
        weights |= load_file(file)
    prefix = "gen_vae."
    vae.load_state_dict({k.removeprefix(prefix): v.float() for k, v in weights.items() if k.startswith(prefix)})
    with torch.inference_mode():
        latents = oracle.denoise(
            torch.from_numpy(given.states), given.ids.tolist(), given.start, (64, 32), 3, 2.5, (0, 1), 7
        )
        image = vae.decode((latents / 0.36 + 0.12)[None]).sample[0]
    expected = ((image * 0.5 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 0).numpy()
    pixels = made.outputs["PIXELS"].astype(int)
    assert pixels.std() > 10
    assert np.abs(pixels - expected).max() <= 1


def test_what_extra_args_say_counts(ensemble: FakeEnsemble) -> None:
    values = {"guidance_scale": 3.5, "extra_args": '{"text_guidance_scale": 2.5, "num_inference_steps": 2}'}
    (made,) = ensemble.infer(wire(**values))
    request = json.loads(made.outputs["INFO"][0])["request"]
    assert (request["guidance_scale"], request["num_inference_steps"]) == (2.5, 2)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"hidden_states": None}, "HIDDEN_STATES = None: is required"),
    ({"token_ids": None}, "TOKEN_IDS = None: is required"),
    ({"answer_start": None}, "ANSWER_START = None: is required"),
    ({"hidden_states": np.zeros((14, 5), np.float32)}, "HIDDEN_STATES = [14, 5]: must have shape [tokens, 24]"),
    ({"token_ids": np.zeros(3, np.int64)}, "TOKEN_IDS = [3]: must have shape [15]"),
    ({"answer_start": 99}, "ANSWER_START = 99: must be between 0 and 15"),
    ({"answer_start": 15}, "must have at least one visual token"),
    ({"width": 50}, "WIDTH = 50: must be a multiple of 16"),
    ({"num_inference_steps": 0}, "NUM_INFERENCE_STEPS = 0: must be between 1 and 200"),
    ({"guidance_scale": float("inf")}, "GUIDANCE_SCALE = inf: must be a finite number"),
    ({"cfg_range": [0.6, 0.5]}, "CFG_RANGE = [0.6, 0.5]: must be two numbers"),
    ({"extra_args": "no"}, "EXTRA_ARGS = 'no': must be a JSON object"),
    ({"hidden_states": np.full((15, 24), np.nan, np.float32)}, "HIDDEN_STATES = nan: must be finite"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message.partition(":")[0] for _, message in BAD])
def test_one_malformed_request_beside_good_ones(ensemble: FakeEnsemble, change: dict[str, Any], message: str) -> None:
    good = wire(num_inference_steps=2)
    first, bad, last = ensemble.infer(good, wire(**change), good)
    assert bad.code == "INVALID_ARG"
    assert message in bad.message
    assert picture(first).size == picture(last).size == (64, 32)


def test_a_call_of_mammoth_dit_by_hand_meets_the_same_checks(ensemble: FakeEnsemble) -> None:
    prepare, dit = ensemble.models["mammoth_prepare"], ensemble.models["mammoth_dit"]
    (prepared,) = prepare.infer(prepare.request(wire()))
    good = {name: prepared.outputs[name] for name in ("REQUEST", "CONDITIONS", "TEXT_TOKENS")}
    resolved = json.loads(good["REQUEST"][0])
    worse = [
        good | {"REQUEST": np.array([json.dumps(resolved | {"cfg_range": [1, 0]}).encode()], np.object_)},
        good | {"CONDITIONS": good["CONDITIONS"][:, :5]},
        good | {"CONDITIONS": good["CONDITIONS"] * np.float32(np.nan)},
        good | {"TEXT_TOKENS": np.array([11], np.int32)},
    ]
    first, *refused, last = dit.infer(*(dit.request(values) for values in (good, *worse, good)))
    assert [(one.code, one.message.partition(" ")[0]) for one in refused] == [
        ("INVALID_ARG", "CFG_RANGE"),
        ("INVALID_ARG", "CONDITIONS"),
        ("INVALID_ARG", "CONDITIONS"),
        ("INVALID_ARG", "TEXT_TOKENS"),
    ]
    assert first.code is last.code is None
    assert first.outputs["LATENTS"].shape == (4, 4, 8)


def test_mixed_requests_of_one_batch_get_their_own_answers(ensemble: FakeEnsemble) -> None:
    sizes = [(32, 32), (64, 32), (32, 64), (48, 80)]
    requests = [
        wire(text=i, visual=1 + 20 * i, width=w, height=h, num_inference_steps=1 + i, cfg_range=[0.2 * i, 1.0])
        for i, (w, h) in enumerate(sizes)
    ]
    for index, (made, size) in enumerate(zip(ensemble.infer(*requests), sizes, strict=True)):
        assert picture(made).size == size
        assert json.loads(made.outputs["INFO"][0])["steps"] == 1 + index


def test_several_devices_are_refused_by_name(mammoth_checkpoint: Path) -> None:
    parameters = {"checkpoint": str(mammoth_checkpoint), "devices": "cpu,cpu"}
    model = import_model("mammoth_dit").TritonPythonModel()
    with pytest.raises(ParameterError, match="devices = 'cpu,cpu': a mammothmoda2 runs on one device"):
        model.initialize(triton_args("mammoth_dit", parameters, kind="MODEL"))
