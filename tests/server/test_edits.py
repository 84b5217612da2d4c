"""Edits through the real server: equal to diffusers, packed with text to image, and safe from bad images."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edit_tools import areas_of, edit_pipeline, encoded, picture
from PIL import Image
from server_tools import (
    TIMEOUT,
    Caller,
    Pixels,
    assert_same_picture,
    code,
    info,
    load,
    logged_requests,
    metric,
    outcomes,
    wait_until,
)
from test_reference_images import BAD
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer
from ditpack_client import Client, EditRequest, GenerationError, ImageRequest, ImageResult

pytestmark = pytest.mark.server

MODEL = "qwen_image_edit"
WIDE, TALL, SQUARE = (
    encoded(picture(150, 70)),
    encoded(picture(60, 200, 1), "JPEG", quality=95),
    encoded(picture(80, 80, 2)),
)
SNOW: dict[str, Any] = {"PROMPT": "make it snow", "NUM_INFERENCE_STEPS": 5, "SEED": 7}


@pytest.fixture(params=["http", "grpc"])
def edit_caller(request: pytest.FixtureRequest, edit_server: TritonServer) -> Iterator[Caller]:
    opened = Caller(edit_server, request.param)
    yield opened
    opened.close()


def ask(caller: Caller, files: list[bytes], **changes: Any) -> dict[str, Any]:
    images = np.array([*files, None], np.object_)[:-1]
    return caller.infer({**SNOW, "IMAGES": images, **changes}, model=MODEL)


def pixels(outputs: dict[str, Any]) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(outputs["IMAGE"].item())))


def test_a_photo_that_comes_again_is_not_encoded_again(edit_caller: Caller, edit_server: TritonServer) -> None:
    def hits() -> float:
        return metric(edit_server, "ditpack_cache_hits_total", model="vae_encoder")

    value = {"http": 7, "grpc": 8}[edit_caller.protocol]
    photo = {"PIXELS": np.full((1, 32 * 48, 3), value, np.uint8), "SIZES": np.array([[[32, 48]]], np.int32)}
    first = edit_caller.infer(photo, model="vae_encoder")["LATENTS"]
    before = hits()
    again = edit_caller.infer(photo, model="vae_encoder")["LATENTS"]
    assert hits() == before + 1
    assert first.tobytes() == again.tobytes()
    assert first.std() > 0


@pytest.mark.parametrize("files", [[TALL], [SQUARE, WIDE], [WIDE, SQUARE, TALL]], ids=len)
def test_equal_diffusers(edit_caller: Caller, tiny_edit_2509_checkpoint: Path, files: list[bytes]) -> None:
    import torch

    with areas_of(tiny_edit_2509_checkpoint):
        theirs = edit_pipeline(tiny_edit_2509_checkpoint)(
            image=[Image.open(io.BytesIO(file)).convert("RGB") for file in files],
            prompt=SNOW["PROMPT"],
            negative_prompt=" ",
            num_inference_steps=SNOW["NUM_INFERENCE_STEPS"],
            generator=torch.Generator("cpu").manual_seed(SNOW["SEED"]),
        ).images[0]
    outputs = ask(edit_caller, files)
    ours = pixels(outputs)
    assert ours.std() > 20, "a picture of nothing would prove nothing"
    assert_same_picture(ours, np.asarray(theirs), 2)
    references = info(outputs)["request"]["references"]
    assert [reference["source"][-4:].strip() for reference in references] == [
        "JPEG" if file is TALL else "PNG" for file in files
    ]


REQUESTS: list[ImageRequest] = [
    {"prompt": "a red kite", "width": 96, "height": 64, "num_inference_steps": 200, "seed": 1},
    EditRequest(prompt="make it snow", images=[TALL], num_inference_steps=190, seed=2, true_cfg_scale=1.0),
    EditRequest(
        prompt="all at night", images=[WIDE, SQUARE, TALL], num_inference_steps=180, seed=3, width=48, height=80
    ),
    EditRequest(prompt="x", images=[SQUARE], num_inference_steps=200, seed=4, negative_prompt="fog"),
]


def test_edits_and_text_to_image_share_packs(edit_server: TritonServer) -> None:
    requests: list[ImageRequest] = [{**request, "output_format": "raw"} for request in REQUESTS]  # type: ignore[misc]
    with Client(edit_server.grpc_url, "grpc") as client:
        alone = [dict(client.generate_many([request], timeout=TIMEOUT))[0] for request in requests]
        wait_until("an idle engine", lambda: load(edit_server) == (0, 0))
        before = metric(edit_server, "ditpack_steps_total")
        together = dict(client.generate_many(requests, concurrency=len(requests), timeout=TIMEOUT))
        steps = metric(edit_server, "ditpack_steps_total") - before
    assert steps < sum(request["num_inference_steps"] or 0 for request in requests)
    for index, solo in enumerate(alone):
        result = together[index]
        assert isinstance(solo, ImageResult), solo
        assert isinstance(result, ImageResult), result
        assert solo.shared_steps == 0
        assert result.shared_steps > 0
        assert_same_picture(np.asarray(result.image), np.asarray(solo.image))


def test_bad_images_disturb_nobody(edit_server: TritonServer, edit_caller: Caller) -> None:
    """Each kind once, while a good edit and a good picture are under way again and again."""
    stop, failures, compared = threading.Event(), [], [0, 0]
    good: list[ImageRequest] = [
        EditRequest(prompt="make it snow", images=[WIDE, TALL], num_inference_steps=20, seed=1, output_format="raw"),
        {"prompt": "a red kite", "num_inference_steps": 20, "seed": 2, "output_format": "raw"},
    ]

    def send(index: int) -> None:
        try:
            with Client(edit_server.grpc_url, "grpc") as client:
                first = None
                while not stop.is_set():
                    result = dict(client.generate_many([good[index]], timeout=TIMEOUT))[0]
                    assert isinstance(result, ImageResult), result
                    first = first if first is not None else np.asarray(result.image)
                    assert_same_picture(np.asarray(result.image), first)
                    compared[index] += 1
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=send, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    try:
        before = outcomes(edit_server)["invalid"]
        kinds = {name: bad for name, bad in BAD.items() if len(bad[0]) < 10**6}
        for name, (data, said) in kinds.items():
            with pytest.raises(InferenceServerException) as caught:
                ask(edit_caller, [WIDE, data])
            assert code(caught.value) == "INVALID_ARG", (name, caught.value)
            assert said.replace("image 1", "image 2") in str(caught.value.message()), name
            assert ".py" not in str(caught.value.message())
        for files, said in (([], "'0 images'"), ([WIDE] * 4, "'4 images'")):
            with pytest.raises(InferenceServerException, match=said):
                ask(edit_caller, files)
        assert len(kinds) >= 15
        assert outcomes(edit_server)["invalid"] == before + len(kinds) + 2
        wait_until("good pictures", lambda: bool(failures) or min(compared) > 1)
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT)
    for failure in failures:
        raise AssertionError("a good request did not end as it does alone") from failure


def test_missing_images_are_refused_by_name(edit_caller: Caller) -> None:
    with pytest.raises(InferenceServerException, match="IMAGES = '0 images': must be 1 … 3 images"):
        edit_caller.infer(SNOW, model=MODEL)


def test_json_callers_send_base64(edit_server: TritonServer, edit_caller: Caller) -> None:
    body = {
        **SNOW,
        "IMAGES": [base64.b64encode(file).decode() for file in (SQUARE, TALL)],
        "RESPONSE_FORMAT": "b64_json",
    }
    request = urllib.request.Request(
        f"{edit_server.http_url}/v2/models/{MODEL}/generate", json.dumps(body).encode(), method="POST"
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=TIMEOUT) as response:
        answer = json.load(response)
    made = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["IMAGE"], validate=True))))
    assert_same_picture(made, pixels(ask(edit_caller, [SQUARE, TALL])))


def test_the_command(edit_server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(TALL)
    (tmp_path / "other.png").write_bytes(WIDE)
    command = [str(Path(sys.executable).with_name("ditpack")), "edit", "photo.jpg", "make it snow", "-o", "out.png"]
    options = ["--image", "other.png", "--steps", "2", "--server", edit_server.http_url]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "out.png") as image:
        assert image.size == (96, 32)


def test_a_checkpoint_that_cannot_edit_still_makes_images(server: TritonServer) -> None:
    assert not {MODEL, "prepare_edit", "vae_encoder"} & set(server.models)
    with Client(server.http_url) as client, pytest.raises(GenerationError, match=f"unknown model: '{MODEL}'") as caught:
        client.edit("make it snow", WIDE)
    assert caught.value.code in ("NOT_FOUND", "INVALID_ARG")


def test_the_log_holds_nothing_of_prompts_and_images(edit_server: TritonServer) -> None:
    lines = str(logged_requests(edit_server))
    assert "prepare_edit" in lines
    assert "snow" not in lines
    assert "passwd" not in lines
