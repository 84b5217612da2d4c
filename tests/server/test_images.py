"""Pictures made by the real server, over every protocol, against diffusers and against themselves."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from server_tools import TIMEOUT, Caller, Pixels, assert_same_picture, info

from ditpack.tritonserver.launch import TritonServer
from ditpack_client import AsyncClient, Client, ImageRequest, ImageResult

pytestmark = pytest.mark.server

KITE: dict[str, Any] = {"PROMPT": "a red kite", "WIDTH": 96, "HEIGHT": 64, "NUM_INFERENCE_STEPS": 6, "SEED": 7}
# Sizes, steps, guidance and negative prompt all differ; what is left out takes the server's default.
CASES: list[dict[str, Any]] = [
    KITE,
    {
        "PROMPT": "two pink hearts on a blue background",
        "NEGATIVE_PROMPT": "blurry, dark",
        "WIDTH": 48,
        "HEIGHT": 80,
        "NUM_INFERENCE_STEPS": 9,
        "TRUE_CFG_SCALE": 2.5,
        "SEED": 8,
    },
    {"PROMPT": "ein Schlüssel 钥匙", "NUM_INFERENCE_STEPS": 5, "TRUE_CFG_SCALE": 1.0, "SEED": 2**63 - 1},
]
REFERENCE_LEVELS = 2  # of 255, between our latents through our VAE and diffusers' own


def picture(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)))


def post(server: TritonServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{server.http_url}{path}", json.dumps(body).encode(), method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=TIMEOUT) as response:
        return dict(json.load(response))


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def kite(server: TritonServer) -> Pixels:
    """KITE as HTTP brings it."""
    caller = Caller(server, "http")
    try:
        return picture(caller.infer(KITE)["IMAGE"].item())
    finally:
        caller.close()


class TestPictures:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["PROMPT"]))
    def test_equal_diffusers(self, caller: Caller, reference: QwenImagePipeline, case: dict[str, Any]) -> None:
        scale = case.get("TRUE_CFG_SCALE", 4.0)
        theirs = reference(
            prompt=case["PROMPT"],
            negative_prompt=case.get("NEGATIVE_PROMPT", " ") if scale > 1 else None,
            true_cfg_scale=scale,
            width=case.get("WIDTH", 64),
            height=case.get("HEIGHT", 64),
            num_inference_steps=case["NUM_INFERENCE_STEPS"],
            generator=torch.Generator("cpu").manual_seed(case["SEED"]),
        ).images[0]
        ours = picture(caller.infer(case)["IMAGE"].item())
        assert ours.std() > 20, "a picture of nothing would prove nothing"
        assert_same_picture(ours, np.asarray(theirs), REFERENCE_LEVELS)

    def test_same_over_every_protocol(self, server: TritonServer, caller: Caller, kite: Pixels) -> None:
        assert_same_picture(picture(caller.infer(KITE)["IMAGE"].item()), kite)
        answer = post(server, "/v2/models/qwen_image/generate", {**KITE, "RESPONSE_FORMAT": "b64_json"})
        assert_same_picture(picture(base64.b64decode(answer["IMAGE"], validate=True)), kite)
        assert answer["SEED_USED"] == KITE["SEED"]
        assert json.loads(answer["INFO"])["request"]["response_format"] == "b64_json"

    def test_another_seed_or_prompt_gives_another_picture(self, http_caller: Caller, kite: Pixels) -> None:
        for change in ({"SEED": 8}, {"PROMPT": "a blue boat"}, {"NEGATIVE_PROMPT": "a red kite"}):
            other = picture(http_caller.infer({**KITE, **change})["IMAGE"].item())
            assert np.abs(other.astype(int) - kite.astype(int)).max() > 20, change

    @pytest.mark.parametrize(("name", "mean"), [("png", 0.5), ("jpeg", 8), ("webp", 25)])
    def test_files(self, caller: Caller, kite: Pixels, name: str, mean: float) -> None:
        """Of the format that was asked for and near the picture; a random VAE's noise is the hardest thing for jpeg."""
        outputs = caller.infer({**KITE, "OUTPUT_FORMAT": name})
        file = Image.open(io.BytesIO(outputs["IMAGE"].item()))
        assert (file.format, file.mode, file.size) == (name.upper(), "RGB", (96, 64))
        assert np.abs(np.asarray(file).astype(int) - kite.astype(int)).mean() <= mean
        assert outputs["PIXELS"].shape == (0, 0, 3)

    def test_raw(self, caller: Caller, kite: Pixels) -> None:
        outputs = caller.infer({**KITE, "OUTPUT_FORMAT": "raw"})
        assert outputs["PIXELS"].dtype == np.uint8
        assert_same_picture(outputs["PIXELS"], kite)
        assert outputs["IMAGE"].item() == b""


class TestBesideThePicture:
    def test_a_drawn_seed_is_returned_and_gives_the_picture_again(self, caller: Caller) -> None:
        unseeded = {name: value for name, value in KITE.items() if name != "SEED"}
        first, second = caller.infer(unseeded), caller.infer(unseeded)
        seed = int(first["SEED_USED"].item())
        assert first["SEED_USED"].dtype == np.int64
        assert first["SEED_USED"].shape == (1,)
        assert 0 <= seed < 2**53
        assert seed != second["SEED_USED"].item()
        assert info(first)["request"]["seed"] == seed
        again = caller.infer({**unseeded, "SEED": seed})
        assert again["SEED_USED"].item() == seed
        assert_same_picture(picture(again["IMAGE"].item()), picture(first["IMAGE"].item()))

    def test_info(self, caller: Caller) -> None:
        """Everything that the wire table promises, defaults filled in."""
        facts = info(caller.infer({"PROMPT": "a key", "SEED": 3, "NUM_INFERENCE_STEPS": 4}))
        assert facts["request"] == {
            "prompt": "a key",
            "negative_prompt": " ",
            "width": 64,
            "height": 64,
            "num_inference_steps": 4,
            "true_cfg_scale": 4.0,
            "seed": 3,
            "output_format": "png",
            "response_format": "bytes",
            "deadline_ms": None,
            "priority": 2,
        }
        assert facts["steps"] == 4
        assert facts["pack"] == {"requests_max": 1, "requests_mean": 1.0, "shared_steps": 0}
        for name in ("queue_ms", "encode_ms", "denoise_ms", "decode_ms"):
            assert 0 < facts[name] < 1000 * TIMEOUT, name
        assert facts.keys() == {"request", "steps", "pack", "queue_ms", "encode_ms", "denoise_ms", "decode_ms"}

    def test_only_what_is_asked_for_is_sent(self, caller: Caller) -> None:
        every = {"IMAGE", "PIXELS", "SEED_USED", "INFO"}
        assert caller.infer(KITE).keys() == every
        for name in sorted(every):
            assert caller.infer(KITE, outputs=[name]).keys() == {name}
        both = caller.infer({**KITE, "OUTPUT_FORMAT": "raw"}, outputs=["PIXELS", "INFO"])
        assert both.keys() == {"PIXELS", "INFO"}
        assert both["PIXELS"].shape == (64, 96, 3)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
class TestClient:
    SETTINGS: ClassVar[Any] = {"width": 96, "height": 64, "num_inference_steps": 6, "seed": 7}

    @staticmethod
    def url(server: TritonServer, protocol: str) -> str:
        return server.http_url if protocol == "http" else f"grpc://{server.grpc_url}"

    def check(self, result: ImageResult, kite: Pixels) -> None:
        assert_same_picture(np.asarray(result.image), kite)
        assert result.seed == 7
        assert result.steps == 6
        assert result.info["request"]["prompt"] == "a red kite"
        assert min(result.queue_ms, result.encode_ms, result.denoise_ms, result.decode_ms) > 0

    def test_sync(self, server: TritonServer, protocol: str, kite: Pixels) -> None:
        with Client(self.url(server, protocol)) as client:
            self.check(client.generate("a red kite", timeout=TIMEOUT, **self.SETTINGS), kite)
            raw = client.generate("a red kite", timeout=TIMEOUT, output_format="raw", **self.SETTINGS)
            self.check(raw, kite)
            same: ImageRequest = {"prompt": "a red kite", **self.SETTINGS}  # type: ignore[typeddict-item]
            found = dict(client.generate_many([same] * 3, timeout=TIMEOUT))
        assert found.keys() == {0, 1, 2}
        for result in found.values():
            assert isinstance(result, ImageResult)
            self.check(result, kite)

    def test_async(self, server: TritonServer, protocol: str, kite: Pixels) -> None:
        async def ask() -> list[ImageResult]:
            async with AsyncClient(self.url(server, protocol)) as client:
                calls = [client.generate("a red kite", timeout=TIMEOUT, **self.SETTINGS) for _ in range(3)]
                return await asyncio.gather(*calls)

        for result in asyncio.run(ask()):
            self.check(result, kite)
