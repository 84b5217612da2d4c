"""The whole ensemble on the tiny checkpoint, door by door, held to every config.pbtxt."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_pb_utils
import numpy as np
import pytest
from fake_triton import MODELS, Answer, FakeEnsemble, FakeModel
from PIL import Image

TYPES = {
    "WIDTH": np.int32,
    "HEIGHT": np.int32,
    "NUM_INFERENCE_STEPS": np.int32,
    "TRUE_CFG_SCALE": np.float32,
    "SEED": np.int64,
    "DEADLINE_MS": np.int32,
    "PRIORITY": np.int32,
}


def wire(**values: Any) -> dict[str, np.ndarray]:
    """A request's plain [1] tensors, by their lower-case names."""
    tensors = {}
    for name, value in values.items():
        field = name.upper()
        tensors[field] = np.array([value.encode() if isinstance(value, str) else value], TYPES.get(field, np.object_))
    return tensors


GOOD = {"prompt": "a red kite", "width": 64, "height": 32, "num_inference_steps": 2, "seed": 7}


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path) -> Iterator[dict[str, FakeModel]]:
    parameters = {name: {"checkpoint": str(tiny_checkpoint), "max_pixels": "65536"} for name in MODELS}
    del parameters["text_encoder"]["max_pixels"]
    loaded = {name: FakeModel(name, parameters[name]) for name in MODELS}
    yield loaded
    for name in ("dit", "vae_decoder"):
        loaded[name].instance.finalize()


@pytest.fixture
def ensemble(models: dict[str, FakeModel]) -> FakeEnsemble:
    fake_pb_utils.Logger.lines.clear()
    return FakeEnsemble("qwen_image", models)


def picture(answer: Answer) -> Image.Image:
    assert answer.code is None, answer.message
    return Image.open(io.BytesIO(answer.outputs["IMAGE"][0]))


def test_a_prompt_becomes_a_picture(ensemble: FakeEnsemble) -> None:
    (answer,) = ensemble.infer(wire(**GOOD))
    image = picture(answer)
    assert (image.format, image.size, image.mode) == ("PNG", (64, 32), "RGB")
    assert answer.outputs["PIXELS"].shape == (0, 0, 3)
    assert answer.outputs["SEED_USED"].tolist() == [7]
    info = json.loads(answer.outputs["INFO"][0])
    assert info["request"] == {
        "prompt": "a red kite",
        "negative_prompt": " ",
        "width": 64,
        "height": 32,
        "num_inference_steps": 2,
        "true_cfg_scale": 4.0,
        "seed": 7,
        "output_format": "png",
        "response_format": "bytes",
        "deadline_ms": None,
        "priority": 2,
    }
    assert info["steps"] == 2
    assert set(info["pack"]) == {"requests_max", "requests_mean", "shared_steps"}
    for name in ("queue_ms", "encode_ms", "denoise_ms", "decode_ms"):
        assert 0 <= info[name] < 60_000, name


def test_every_format_holds_the_same_picture(ensemble: FakeEnsemble) -> None:
    formats = ["png", "jpeg", "webp", "raw"]
    files = ensemble.infer(*(wire(**GOOD, output_format=name) for name in formats))
    texts = ensemble.infer(*(wire(**GOOD, output_format=name, response_format="b64_json") for name in formats))
    pixels = files[3].outputs["PIXELS"].astype(int)
    assert pixels.shape == (32, 64, 3)
    assert pixels.std() > 0
    assert files[3].outputs["IMAGE"].tolist() == [b""]
    assert texts[3].outputs["IMAGE"].tolist() == [b""]
    for name, file, text in zip(formats[:3], files[:3], texts[:3], strict=True):
        image = picture(file)
        assert image.format == name.upper()
        difference = np.abs(np.asarray(image.convert("RGB")).astype(int) - pixels)
        assert difference.max() <= (1 if name == "png" else 120), name  # packed otherwise: one level at most
        assert difference.mean() < (0.1 if name == "png" else 12), name
        decoded = Image.open(io.BytesIO(base64.b64decode(text.outputs["IMAGE"][0], validate=True)))
        assert (decoded.format, decoded.size) == (name.upper(), (64, 32))


def test_seeds_are_drawn_returned_and_enough_to_repeat(ensemble: FakeEnsemble) -> None:
    unseeded = {name: value for name, value in GOOD.items() if name != "seed"} | {"output_format": "raw"}
    first, second = ensemble.infer(wire(**unseeded), wire(**unseeded))
    seeds = [int(answer.outputs["SEED_USED"][0]) for answer in (first, second)]
    assert seeds[0] != seeds[1]
    assert not np.array_equal(first.outputs["PIXELS"], second.outputs["PIXELS"])
    (again,) = ensemble.infer(wire(**unseeded, seed=seeds[0]))
    assert np.abs(again.outputs["PIXELS"].astype(int) - first.outputs["PIXELS"]).max() <= 1


def test_mixed_requests_of_one_batch_get_their_own_answers(ensemble: FakeEnsemble) -> None:
    sizes = [(32, 32), (64, 32), (32, 64), (48, 80)]
    requests = [
        wire(prompt="x" * (1 + 9 * i), width=w, height=h, num_inference_steps=1 + i, true_cfg_scale=[1.0, 4.0][i % 2])
        for i, (w, h) in enumerate(sizes)
    ]
    for index, (answer, size) in enumerate(zip(ensemble.infer(*requests), sizes, strict=True)):
        assert picture(answer).size == size
        info = json.loads(answer.outputs["INFO"][0])
        assert info["steps"] == 1 + index
        assert info["request"]["negative_prompt"] == [None, " "][index % 2]


BAD = [
    ({"prompt": "  "}, "PROMPT", "'  '", "must not be blank"),
    ({"prompt": "word " * 5000}, "PROMPT", "characters", "must not exceed"),
    ({"prompt": "x" * 10_000_000}, "PROMPT", "(10000000 characters)", "must not exceed"),
    ({"prompt": b"\xff\xfe"}, "PROMPT", r"b'\xff\xfe'", "must be valid UTF-8"),
    ({"prompt": None}, "PROMPT", "None", "is required"),
    ({"negative_prompt": b"\xff"}, "NEGATIVE_PROMPT", r"b'\xff'", "must be valid UTF-8"),
    ({"negative_prompt": "word " * 5000}, "NEGATIVE_PROMPT", "characters", "must not exceed"),
    ({"width": 0}, "WIDTH", "0", "must be between"),
    ({"height": -64}, "HEIGHT", "-64", "must be between"),
    ({"width": 65}, "WIDTH", "65", "must be a multiple of 16"),
    ({"width": 100000}, "WIDTH", "100000", "must be between"),
    ({"num_inference_steps": 0}, "NUM_INFERENCE_STEPS", "0", "must be between 1 and 200"),
    ({"num_inference_steps": 1000}, "NUM_INFERENCE_STEPS", "1000", "must be between 1 and 200"),
    ({"true_cfg_scale": float("nan")}, "TRUE_CFG_SCALE", "nan", "must be a finite number"),
    ({"true_cfg_scale": 0.5}, "TRUE_CFG_SCALE", "0.5", "at least 1"),
    ({"seed": -1}, "SEED", "-1", "must be between 0 and 9223372036854775807"),
    ({"output_format": "gif"}, "OUTPUT_FORMAT", "'gif'", "must be one of png, jpeg, webp, raw"),
    ({"response_format": "url"}, "RESPONSE_FORMAT", "'url'", "must be one of bytes, b64_json"),
    ({"deadline_ms": 0}, "DEADLINE_MS", "0", "must be between 1 and"),
]


@pytest.mark.parametrize(("change", "field", "value", "rule"), BAD, ids=[f"{b[1]}={str(b[2])[:20]}" for b in BAD])
def test_bad_input_is_refused_by_name_and_its_neighbours_are_not(
    ensemble: FakeEnsemble, change: dict[str, Any], field: str, value: str, rule: str
) -> None:
    bad = {name: given for name, given in (GOOD | change).items() if given is not None}
    before, refused, after = ensemble.infer(wire(**GOOD), wire(**bad), wire(**GOOD))
    assert refused.code == "INVALID_ARG"
    assert refused.message.startswith(f"{field} = ")
    assert value in refused.message
    assert rule in refused.message
    assert len(refused.message) < 400
    for answer in (before, after):
        assert picture(answer).size == (64, 32)


def test_what_is_not_asked_for_is_not_made(models: dict[str, FakeModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the inner models: each output alone."""
    prepare, text_encoder, dit, vae = (models[name] for name in MODELS)
    (prepared,) = prepare.infer(prepare.request(wire(**GOOD)))
    ids = {name: prepared.outputs[name] for name in ("INPUT_IDS", "NEGATIVE_INPUT_IDS")}
    embeds = text_encoder.infer(*(text_encoder.request({"INPUT_IDS": array}) for array in ids.values()))
    inputs = {"REQUEST": prepared.outputs["REQUEST"]}
    conditioning = {"EMBEDS": embeds[0].outputs["EMBEDS"], "NEGATIVE_EMBEDS": embeds[1].outputs["EMBEDS"]}
    (denoised,) = dit.infer(dit.request(inputs | conditioning))
    (info_only,) = dit.infer(dit.request(inputs | conditioning, ["INFO"]))
    assert list(info_only.outputs) == ["INFO"]

    def no_encoding(*_: Any) -> bytes:
        raise AssertionError("encoded an image nobody asked for")

    monkeypatch.setattr("ditpack.tritonserver.vae_decoder_door.encode_image", no_encoding)
    latents = inputs | denoised.outputs
    for names in (["INFO"], ["PIXELS"], ["PIXELS", "INFO"]):
        (answer,) = vae.infer(vae.request(latents, names))
        assert sorted(answer.outputs) == sorted(names)
        if "PIXELS" in names:
            assert answer.outputs["PIXELS"].size > 0, "without IMAGE they are what a next step goes on with"
    (answer,) = vae.infer(vae.request(latents))
    assert answer.code == "INTERNAL"
    assert "nobody asked" not in answer.message


def test_hand_made_calls_to_inner_models_meet_the_same_checks(models: dict[str, FakeModel]) -> None:
    prepare, text_encoder, dit, vae = (models[name] for name in MODELS)
    for ids in ([1, 2], [0] * 40 + [10**6], [-1] * 40, []):
        (answer,) = text_encoder.infer(text_encoder.request({"INPUT_IDS": np.array(ids, np.int64)}))
        assert (answer.code, answer.message[:9]) == ("INVALID_ARG", "INPUT_IDS")
    (prepared,) = prepare.infer(prepare.request(wire(**GOOD)))
    request, ids = prepared.outputs["REQUEST"], prepared.outputs["INPUT_IDS"]
    (encoded,) = text_encoder.infer(text_encoder.request({"INPUT_IDS": ids}))
    embeds = encoded.outputs["EMBEDS"]

    def json_text(text: str) -> np.ndarray:
        return np.array([text.encode()], np.object_)

    resolved = json.loads(request[0])
    cases = [
        ({"REQUEST": json_text("{")}, "REQUEST"),
        ({"REQUEST": json_text("[]")}, "REQUEST"),
        ({"REQUEST": json_text(json.dumps(resolved | {"width": 65}))}, "WIDTH"),
        ({"EMBEDS": embeds[:0]}, "EMBEDS"),
        ({"EMBEDS": np.ascontiguousarray(embeds[:, :-1])}, "EMBEDS"),
        ({"EMBEDS": np.full_like(embeds, np.nan)}, "EMBEDS"),
        ({"NEGATIVE_EMBEDS": np.full_like(embeds, -np.inf)}, "NEGATIVE_EMBEDS"),
    ]
    good = {"REQUEST": request, "EMBEDS": embeds, "NEGATIVE_EMBEDS": embeds}
    answers = dit.infer(*(dit.request(good | change) for change, _ in cases), dit.request(good))
    for (_, field), answer in zip(cases, answers, strict=False):
        assert (answer.code, answer.message.split(" = ")[0]) == ("INVALID_ARG", field)
    denoised = answers[-1].outputs
    latents = denoised["LATENTS"]
    assert latents.shape[1:] == (4, 8)

    good = {"REQUEST": request, **denoised}
    cases = [
        ({"REQUEST": json_text("nonsense")}, "REQUEST"),
        ({"LATENTS": np.ascontiguousarray(latents[:, :, :4])}, "LATENTS"),
        ({"LATENTS": np.ascontiguousarray(latents[:1])}, "LATENTS"),
        ({"INFO": json_text("7")}, "INFO"),
    ]
    answers = vae.infer(*(vae.request(good | change) for change, _ in cases), vae.request(good))
    for (_, field), answer in zip(cases, answers, strict=False):
        assert (answer.code, answer.message.split(" = ")[0]) == ("INVALID_ARG", field)
    assert picture(answers[-1]).size == (64, 32)


def test_broken_latents_fail_alone(models: dict[str, FakeModel]) -> None:
    prepare, vae = models["prepare"], models["vae_decoder"]
    (prepared,) = prepare.infer(prepare.request(wire(**GOOD)))
    z_dim = vae.instance._door._decoder.z_dim
    latents = {"INFO": np.array([b"{}"], np.object_), "REQUEST": prepared.outputs["REQUEST"]}
    good = latents | {"LATENTS": np.zeros((z_dim, 4, 8), np.float32)}
    bad = latents | {"LATENTS": np.full((z_dim, 4, 8), np.nan, np.float32)}
    first, broken, last = vae.infer(vae.request(good), vae.request(bad), vae.request(good))
    assert (broken.code, broken.message) == ("INVALID_ARG", "LATENTS = nan: must be finite")
    assert picture(first).size == picture(last).size == (64, 32)


def test_deadlines_that_have_passed_cost_no_work(models: dict[str, FakeModel], monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, dit, vae = models["prepare"], models["dit"], models["vae_decoder"]
    (prepared,) = prepare.infer(prepare.request(wire(**GOOD, deadline_ms=1)))
    request = json.loads(prepared.outputs["REQUEST"][0]) | {"accepted_ns": 0}
    late = {"REQUEST": np.array([json.dumps(request).encode()], np.object_)}
    embeds = np.zeros((3, 4), np.float32)  # would be refused as too narrow, if anyone looked
    (answer,) = dit.infer(dit.request(late | {"EMBEDS": embeds, "NEGATIVE_EMBEDS": embeds}))
    assert (answer.code, answer.message) == ("CANCELLED", "DEADLINE_MS = 1: the deadline passed before denoising began")
    latents = {"LATENTS": np.zeros((1, 1, 1), np.float32), "INFO": np.array([b"{}"], np.object_)}
    (answer,) = vae.infer(vae.request(late | latents))
    assert (answer.code, answer.message) == ("CANCELLED", "DEADLINE_MS = 1: the deadline passed before decoding began")


def test_each_request_leaves_one_log_line_and_no_prompt(ensemble: FakeEnsemble) -> None:
    secret = GOOD | {"prompt": "zanzibar", "negative_prompt": "quixotic"}
    ensemble.infer(wire(**secret), wire(**(secret | {"width": 65})), wire(**(secret | {"prompt": "zanzibar " * 9000})))
    lines = [json.loads(line) for _, line in fake_pb_utils.Logger.lines]
    assert sorted((line["id"], line["model"], line["outcome"]) for line in lines) == [
        ("request 0", "vae_decoder", "ok"),
        ("request 1", "prepare", "invalid"),
        ("request 2", "prepare", "invalid"),
    ]
    ok = next(line for line in lines if line["outcome"] == "ok")
    assert (ok["width"], ok["height"], ok["steps"]) == (64, 32, 2)
    assert ok["total_ms"] > ok["denoise_ms"] > 0
    assert not any(word in line for _, line in fake_pb_utils.Logger.lines for word in ("zanzibar", "quixotic"))


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_that_is_not_there_stops_the_load(model: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such directory"):
        FakeModel(model, {"checkpoint": str(tmp_path / "nothing")})


def test_an_unknown_attention_backend_stops_the_load(tiny_checkpoint: Path) -> None:
    with pytest.raises(Exception, match=r"model 'dit': parameter attention = 'flash9': .*must be one of"):
        FakeModel("dit", {"checkpoint": str(tiny_checkpoint), "attention": "flash9"})
