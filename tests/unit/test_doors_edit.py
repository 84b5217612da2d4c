"""The edit ensemble on a tiny checkpoint, door by door, held to every config.pbtxt; text to image beside it."""

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
from edit_tools import encoded, picture
from fake_triton import EDIT_MODELS, MODELS, Answer, FakeEnsemble, FakeModel
from PIL import Image
from test_doors_pipeline import wire

GOOD = {"prompt": "make it snow", "num_inference_steps": 2, "seed": 7, "output_format": "raw"}


def edit(*files: bytes, **values: Any) -> dict[str, np.ndarray]:
    return wire(**(GOOD | values)) | {"IMAGES": np.array([*files, None], np.object_)[:-1]}


@pytest.fixture(scope="module")
def models(tiny_edit_2509_checkpoint: Path) -> Iterator[dict[str, FakeModel]]:
    parameters = {"checkpoint": str(tiny_edit_2509_checkpoint)}
    loaded = {name: FakeModel(name, parameters) for name in {*MODELS, *EDIT_MODELS}}
    yield loaded
    for name in ("prepare_edit", "dit", "vae_decoder"):
        loaded[name].instance.finalize()


@pytest.fixture
def ensemble(models: dict[str, FakeModel]) -> FakeEnsemble:
    fake_pb_utils.Logger.lines.clear()
    return FakeEnsemble("qwen_image_edit", models)


def pixels(answer: Answer) -> np.ndarray:
    assert answer.code is None, answer.message
    return answer.outputs["PIXELS"].astype(int)


WIDE, TALL = encoded(picture(150, 70)), encoded(picture(60, 200, 1), "JPEG")


def test_images_and_a_prompt_become_a_picture(ensemble: FakeEnsemble) -> None:
    """What INFO says of the images, and sizes: the last image's aspect, or what was asked for."""
    answer, sized = ensemble.infer(edit(WIDE, TALL), edit(WIDE, TALL, width=48, height=64))
    assert pixels(answer).shape == (128, 32, 3)
    assert pixels(sized).shape == (64, 48, 3)
    request = json.loads(answer.outputs["INFO"][0])["request"]
    assert (request["width"], request["height"]) == (32, 128)
    assert request["references"] == [
        {"width": 96, "height": 32, "source": "150x70 PNG"},
        {"width": 32, "height": 128, "source": "60x200 JPEG"},
    ]


def test_every_image_and_its_place_matter(ensemble: FakeEnsemble) -> None:
    other = encoded(picture(60, 200, 2))
    size = {"width": 64, "height": 64}
    answers = ensemble.infer(*(edit(*files, **size) for files in ([WIDE, TALL], [TALL, WIDE], [WIDE, other], [WIDE])))
    made = [pixels(answer) for answer in answers]
    for i in range(len(made)):
        for j in range(i):
            assert np.abs(made[i] - made[j]).max() > 4, (i, j)


def test_guidance_off_needs_no_second_look_at_the_images(ensemble: FakeEnsemble, models: dict[str, FakeModel]) -> None:
    prepare = models["prepare_edit"]
    (prepared,) = prepare.infer(prepare.request(edit(WIDE, true_cfg_scale=1.0)))
    assert len(prepared.outputs["NEGATIVE_INPUT_IDS"]) < 50
    (answer,) = ensemble.infer(edit(WIDE, true_cfg_scale=1.0))
    assert pixels(answer).std() > 0


def test_base64_is_the_same_image(ensemble: FakeEnsemble) -> None:
    plain, text = ensemble.infer(edit(TALL), edit(base64.b64encode(TALL)))
    assert np.abs(pixels(plain) - pixels(text)).max() <= 1
    assert "base64" in json.loads(text.outputs["INFO"][0])["request"]["references"][0]["source"]


def test_text_to_image_of_the_same_checkpoint(ensemble: FakeEnsemble, models: dict[str, FakeModel]) -> None:
    (answer,) = FakeEnsemble("qwen_image", models).infer(wire(**GOOD, width=64, height=32))
    assert pixels(answer).shape == (32, 64, 3)
    assert "references" not in json.loads(answer.outputs["INFO"][0])["request"]


@pytest.mark.parametrize(
    ("files", "changes", "said"),
    [
        ([], {}, "IMAGES = '0 images': must be 1 … 3 images for this QwenImageEditPlusPipeline"),
        ([WIDE] * 4, {}, "IMAGES = '4 images': must be 1 … 3 images"),
        ([WIDE, b""], {}, "image 2 is empty"),
        ([b"https://example.org/a.png"], {}, "image 1 must be the image file itself: URLs are not fetched"),
        ([WIDE], {"prompt": " "}, "PROMPT = ' ': must not be blank"),
        ([WIDE], {"prompt": None}, "PROMPT = None: is required"),
        ([b"broken"], {"width": 65}, "WIDTH = 65: must be a multiple of 16"),  # before anything is decoded
        ([WIDE], {"negative_prompt": "<|image_pad|>"}, "must not contain the special token"),
    ],
)
def test_what_cannot_be_edited_is_refused_alone(
    ensemble: FakeEnsemble, files: list[bytes], changes: dict[str, Any], said: str
) -> None:
    before, refused, after = ensemble.infer(edit(WIDE), edit(*files, **changes), edit(WIDE))
    assert refused.code == "INVALID_ARG"
    assert said in refused.message
    assert np.abs(pixels(before) - pixels(after)).max() <= 1


def test_hand_made_calls_meet_the_same_checks(models: dict[str, FakeModel]) -> None:
    prepare, text_encoder, vae_encoder, dit, _ = (models[name] for name in EDIT_MODELS)
    (prepared,) = prepare.infer(prepare.request(edit(WIDE, TALL)))
    made = prepared.outputs
    vision = {"PIXELS": made["CONDITION_PIXELS"], "SIZES": made["CONDITION_SIZES"]}
    vae = {"PIXELS": made["REFERENCE_PIXELS"], "SIZES": made["REFERENCE_SIZES"]}
    ids = {"INPUT_IDS": made["INPUT_IDS"]}

    def sizes(*values: list[int]) -> np.ndarray:
        return np.array(values, np.int32)

    for model, good, bad in [
        (text_encoder, ids | vision, {"SIZES": sizes([1, 1])}),
        (text_encoder, ids | vision, {"SIZES": sizes([-5, -5])}),
        (text_encoder, ids | vision, {"PIXELS": vision["PIXELS"][:784], "SIZES": sizes([28, 28])}),
        (text_encoder, ids | vision, {"PIXELS": vision["PIXELS"][:100], "SIZES": sizes([10, 10])}),
        (vae_encoder, vae, {"SIZES": vae["SIZES"][:1]}),
        (vae_encoder, vae, {"PIXELS": vae["PIXELS"][:100], "SIZES": sizes([10, 10])}),
        (vae_encoder, vae, {"PIXELS": vae["PIXELS"][:0], "SIZES": vae["SIZES"][:0]}),
    ]:
        refused, done = model.infer(model.request(good | bad), model.request(good))
        assert refused.code == "INVALID_ARG", (model.name, bad)
        assert done.code is None, done.message
    (alone,) = text_encoder.infer(text_encoder.request(ids))
    assert (alone.code, alone.message[:9]) == ("INVALID_ARG", "INPUT_IDS")

    (embeds,) = text_encoder.infer(text_encoder.request(ids | vision))
    (latents,) = vae_encoder.infer(vae_encoder.request(vae))
    tokens = latents.outputs["LATENTS"]
    assert tokens.shape == (2 * 6 + 8 * 2, 64)
    good = {"REQUEST": made["REQUEST"], "REFERENCE_LATENTS": tokens}
    good |= {"EMBEDS": embeds.outputs["EMBEDS"], "NEGATIVE_EMBEDS": embeds.outputs["EMBEDS"]}
    resolved = json.loads(made["REQUEST"][0])

    def with_references(value: Any) -> np.ndarray:
        return np.array([json.dumps(resolved | {"references": value}).encode()], np.object_)

    one = resolved["references"][0]
    for bad, field in [
        ({"REFERENCE_LATENTS": tokens[:-1]}, "REFERENCE_LATENTS"),
        ({"REFERENCE_LATENTS": np.ascontiguousarray(tokens[:, :-1])}, "REFERENCE_LATENTS"),
        ({"REFERENCE_LATENTS": np.full_like(tokens, np.nan)}, "REFERENCE_LATENTS"),
        ({"REQUEST": with_references([one])}, "REFERENCE_LATENTS"),
        ({"REQUEST": with_references([one] * 4)}, "REFERENCES"),
        ({"REQUEST": with_references("photo.png")}, "REFERENCES"),
        ({"REQUEST": with_references([one | {"height": 65}, one])}, "REFERENCES"),
        ({"REQUEST": with_references([{"width": 64}])}, "REFERENCES"),
        ({"REQUEST": with_references([one | {"width": -64}, one])}, "width"),
    ]:
        refused, done = dit.infer(dit.request(good | bad), dit.request(good))
        assert (refused.code, refused.message.split(" = ")[0]) == ("INVALID_ARG", field), bad
        assert done.code is None, done.message


def test_a_checkpoint_that_cannot_edit_stops_the_load(tiny_checkpoint: Path) -> None:
    with pytest.raises(Exception, match=r"model_index\.json: _class_name = 'QwenImagePipeline': cannot edit images"):
        FakeModel("prepare_edit", {"checkpoint": str(tiny_checkpoint)})


def test_each_request_leaves_one_log_line_and_nothing_of_its_images(ensemble: FakeEnsemble) -> None:
    ensemble.infer(edit(WIDE), edit(b"zanzibar"))
    lines = [json.loads(line) for _, line in fake_pb_utils.Logger.lines]
    assert sorted((line["id"], line["model"], line["outcome"]) for line in lines) == [
        ("request 0", "vae_decoder", "ok"),
        ("request 1", "prepare_edit", "invalid"),
    ]
    assert "zanzibar" not in str(fake_pb_utils.Logger.lines)


def test_a_file_of_the_answer(ensemble: FakeEnsemble) -> None:
    (answer,) = ensemble.infer(edit(WIDE, output_format="png"))
    assert Image.open(io.BytesIO(answer.outputs["IMAGE"][0])).size == (96, 32)
