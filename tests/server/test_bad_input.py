"""Bad input, over HTTP and gRPC, while good requests are in flight: refused by name, and nobody else notices."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from server_tools import TIMEOUT, Caller, Pixels, assert_same_picture, code, load, outcomes, wait_until
from stages import DitInputs, dit_inputs, text
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer
from ditpack_client import Client, ImageRequest, ImageResult

pytestmark = pytest.mark.server

GOOD: list[ImageRequest] = [
    {"prompt": "a red kite", "width": 96, "height": 64, "num_inference_steps": 40, "seed": 1},
    {"prompt": "x", "width": 48, "height": 80, "num_inference_steps": 25, "seed": 2, "true_cfg_scale": 1.0},
    {"prompt": "tree " * 60, "width": 64, "height": 64, "num_inference_steps": 60, "seed": 3, "negative_prompt": "fog"},
]


class GoodTraffic:
    """One thread for each of GOOD sends it again and again and compares every picture with the one it has alone."""

    def __init__(self, server: TritonServer) -> None:
        self._client = Client(server.grpc_url, "grpc")
        self._alone = [self._ask(request) for request in GOOD]
        self._stop = threading.Event()
        self.compared = [0] * len(GOOD)
        self.in_packs = [0] * len(GOOD)
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._send, args=(index,)) for index in range(len(GOOD))]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        for failure in self.failures:
            raise AssertionError("a good request did not end as it does alone") from failure

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT)
        self._client.close()

    def _ask(self, request: ImageRequest) -> ImageResult:
        asked: ImageRequest = {**request, "output_format": "raw"}
        ((_, result),) = self._client.generate_many([asked], timeout=TIMEOUT)
        if not isinstance(result, ImageResult):
            raise result
        return result

    def _send(self, index: int) -> None:
        try:
            while not self._stop.is_set():
                result = self._ask(GOOD[index])
                assert_same_picture(pixels(result), pixels(self._alone[index]))
                self.compared[index] += 1
                self.in_packs[index] += result.shared_steps > 0
        except BaseException as failure:
            self.failures.append(failure)


def pixels(result: ImageResult) -> Pixels:
    return np.asarray(result.image)


@pytest.fixture(scope="module")
def traffic(server: TritonServer) -> Iterator[GoodTraffic]:
    running = GoodTraffic(server)
    try:
        yield running
    finally:
        running.close()
    running.check()


@pytest.fixture(autouse=True)
def good_requests_are_in_flight(server: TritonServer, traffic: GoodTraffic) -> Iterator[None]:
    wait_until("good requests in flight", lambda: load(server)[0] > 0 or bool(traffic.failures))
    yield
    traffic.check()


def refused(caller: Caller, values: dict[str, Any], **options: Any) -> str:
    """Send what must be refused as INVALID_ARG; its message."""
    with pytest.raises(InferenceServerException) as caught:
        caller.infer(values, **options)
    assert code(caught.value) == "INVALID_ARG", caught.value
    message = str(caught.value.message())
    assert ".py" not in message, "the message tells of our files"
    assert len(message) < 600, "the message repeats a long value"
    return message


def base(**changes: Any) -> dict[str, Any]:
    return {"PROMPT": "a red kite", "NUM_INFERENCE_STEPS": 4, "SEED": 1, **changes}


# What is sent, and what the answer must name: the field, its value, the rule.
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "blank prompt": (base(PROMPT=" \n\t"), ("PROMPT = ", r"' \n\t'", "must not be blank")),
    "empty prompt": (base(PROMPT=""), ("PROMPT = ''", "must not be blank")),
    "over-long prompt": (base(PROMPT="a red kite and " * 400), ("PROMPT = 'a red kite", "6000 characters", "tokens")),
    "over-long negative": (base(NEGATIVE_PROMPT="fog " * 2000), ("NEGATIVE_PROMPT = 'fog", "8000 char", "tokens")),
    "10 MB prompt": (base(PROMPT="kite " * 2**21), ("PROMPT = 'kite", "10485760 characters", "exceed 1024 tokens")),
    "special token": (base(PROMPT="<|im_end|>"), ("PROMPT = '<|im_end|>'", "token")),
    "not UTF-8": (base(PROMPT=b"\xff\xfekite"), ("PROMPT = ", r"b'\xff\xfekite'", "must be valid UTF-8")),
    "negative not UTF-8": (base(NEGATIVE_PROMPT=b"\xc3("), ("NEGATIVE_PROMPT = ", r"b'\xc3('", "must be valid UTF-8")),
    "width 0": (base(WIDTH=0), ("WIDTH = 0", "between 32 and")),
    "width -64": (base(WIDTH=-64), ("WIDTH = -64", "between 32 and")),
    "width 65": (base(WIDTH=65), ("WIDTH = 65", "multiple of 16")),
    "width 100000": (base(WIDTH=100000), ("WIDTH = 100000", "between 32 and")),
    "height 0": (base(HEIGHT=0), ("HEIGHT = 0", "between 32 and")),
    "height 65": (base(HEIGHT=65), ("HEIGHT = 65", "multiple of 16")),
    "too many pixels": (base(WIDTH=4096, HEIGHT=2048), ("WIDTH x HEIGHT = '4096x2048'", "exceed 4194304 pixels")),
    "steps 0": (base(NUM_INFERENCE_STEPS=0), ("NUM_INFERENCE_STEPS = 0", "between 1 and 200")),
    "steps 1000": (base(NUM_INFERENCE_STEPS=1000), ("NUM_INFERENCE_STEPS = 1000", "between 1 and 200")),
    "guidance NaN": (base(TRUE_CFG_SCALE=float("nan")), ("TRUE_CFG_SCALE = nan", "finite number of at least 1")),
    "guidance inf": (base(TRUE_CFG_SCALE=float("inf")), ("TRUE_CFG_SCALE = inf", "finite number of at least 1")),
    "guidance 0.5": (base(TRUE_CFG_SCALE=0.5), ("TRUE_CFG_SCALE = 0.5", "finite number of at least 1")),
    "seed -1": (base(SEED=-1), ("SEED = -1", "between 0 and 9223372036854775807")),
    "unknown format": (base(OUTPUT_FORMAT="gif"), ("OUTPUT_FORMAT = 'gif'", "one of png, jpeg, webp, raw")),
    "unknown response": (base(RESPONSE_FORMAT="url"), ("RESPONSE_FORMAT = 'url'", "one of bytes, b64_json")),
    "deadline 0": (base(DEADLINE_MS=0), ("DEADLINE_MS = 0", "between 1 and")),
    "missing prompt": ({"WIDTH": 64}, ("PROMPT = None", "is required")),
}
# Refused by Triton itself, before any model sees it.
BAD_TENSORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "wrong dtype": (base(WIDTH=np.array([64], np.int64)), ("'WIDTH'", "'INT64'", "expects 'INT32'")),
    "prompt as numbers": (base(PROMPT=np.array([1.0], np.float32)), ("'PROMPT'", "'FP32'", "expects 'BYTES'")),
    "two seeds": (base(SEED=np.array([1, 2])), ("'SEED'", "[2]", "[1]")),
    "unknown input": (base(STEPS=np.array([4], np.int32)), ("'STEPS'", "'qwen_image'")),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_by_name(server: TritonServer, caller: Caller, case: str) -> None:
    values, named = BAD[case]
    before = outcomes(server)["invalid"]
    message = refused(caller, values)
    for part in named:
        assert part in message
    assert outcomes(server)["invalid"] == before + 1


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_refused_by_triton(caller: Caller, case: str) -> None:
    values, named = BAD_TENSORS[case]
    message = refused(caller, values)
    for part in named:
        assert part in message


@pytest.mark.parametrize("body", [b"", b'{"inputs": [', b'{"PROMPT": "a', b"[]", b'{"inputs": 3}', b"\x00\xff"])
@pytest.mark.parametrize("endpoint", ["infer", "generate"])
def test_malformed_json(server: TritonServer, endpoint: str, body: bytes) -> None:
    """Triton's own front end answers this, with 400 or (malformed JSON, as of 2.51) 500; never with a picture."""
    request = urllib.request.Request(f"{server.http_url}/v2/models/qwen_image/{endpoint}", body, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as caught:
        opener.open(request, timeout=TIMEOUT)
    with caught.value as answer:
        assert answer.code in (400, 500)
        assert json.load(answer)["error"]


class TestHandMade:
    """Calls that go around ``prepare``, straight to the inner models."""

    @pytest.fixture
    def inputs(self, caller: Caller) -> DitInputs:
        return dit_inputs(caller, base())

    def request(self, inputs: DitInputs, **changes: Any) -> Any:
        return text(json.dumps({**json.loads(inputs.request.item()), **changes}))

    def test_requests(self, caller: Caller, inputs: DitInputs) -> None:
        """``dit`` and ``vae_decoder`` hold a request to the rules that ``prepare`` holds it to."""
        latents = np.zeros((1, 16, 8, 8), np.float32)
        for request, named in {
            "{": ("REQUEST = ", "must be the JSON object"),
            "[1]": ("REQUEST = ", "must be the JSON object"),
            "[" * 5000: ("REQUEST = ", "must be the JSON object"),
            "{}": ("PROMPT = None", "is required"),
            self.request(inputs, width=65).item(): ("WIDTH = 65", "multiple of 16"),
            self.request(inputs, width="64").item(): ("WIDTH = '64'", "integer"),
            self.request(inputs, num_inference_steps=1000).item(): ("NUM_INFERENCE_STEPS = 1000", "between 1 and 200"),
            self.request(inputs, true_cfg_scale=float("nan")).item(): ("TRUE_CFG_SCALE = nan", "finite"),
            self.request(inputs, steps=4).item(): ("STEPS = 4", "unknown field"),
        }.items():
            for model, values in {
                "dit": inputs.values(REQUEST=text(request)),
                "vae_decoder": {"REQUEST": text(request), "LATENTS": latents, "INFO": text("{}")},
            }.items():
                message = refused(caller, values, model=model)
                for part in named:
                    assert part in message, (model, request)

    @pytest.mark.parametrize("name", ["EMBEDS", "NEGATIVE_EMBEDS"])
    def test_embeds(self, caller: Caller, inputs: DitInputs, name: str) -> None:
        good = inputs.values()[name]
        bad = good.copy()
        bad[0, 1, 2] = np.nan
        for embeds, named in (
            (good[:, :, :-1], (f"{name} = [{good.shape[1]}, 31]", "must have shape")),
            (np.zeros((1, 0, 32), np.float32), (f"{name} = [0, 32]", "must have shape")),
            (np.zeros((1, 5000, 32), np.float32), (f"{name} = [5000, 32]", "must have shape")),
            (bad, (f"{name} = nan", "must be finite")),
        ):
            message = refused(caller, inputs.values(**{name: embeds}), model="dit")
            for part in named:
                assert part in message

    def test_latents(self, caller: Caller, inputs: DitInputs) -> None:
        bad = np.zeros((1, 16, 8, 8), np.float32)
        bad[0, 3, 2, 1] = np.inf
        for latents, named in (
            (np.zeros((1, 16, 8, 9), np.float32), ("LATENTS = [16, 8, 9]", "must have shape [16, 8, 8]")),
            (np.zeros((1, 4, 8, 8), np.float32), ("LATENTS = [4, 8, 8]", "must have shape [16, 8, 8]")),
            (np.zeros((1, 16, 0, 8), np.float32), ("LATENTS = [16, 0, 8]", "must have shape [16, 8, 8]")),
            (bad, ("LATENTS = inf", "must be finite")),
        ):
            values = {"REQUEST": inputs.request, "LATENTS": latents, "INFO": text("{}")}
            message = refused(caller, values, model="vae_decoder")
            for part in named:
                assert part in message

    def test_info(self, caller: Caller, inputs: DitInputs) -> None:
        for bad in ("", "[]", "{"):
            values = {"REQUEST": inputs.request, "LATENTS": np.zeros((1, 16, 8, 8), np.float32), "INFO": text(bad)}
            assert "INFO = " in refused(caller, values, model="vae_decoder")

    def test_batches(self, caller: Caller, inputs: DitInputs) -> None:
        """One request makes one image: what carries two is refused, not half served."""
        twice = {name: np.concatenate([array, array]) for name, array in inputs.values().items()}
        assert "batch-size must be <= 1" in refused(caller, twice, model="dit")
        ids = np.full((2, 40), 5, np.int64)
        assert "one request makes one image" in refused(caller, {"INPUT_IDS": ids}, model="text_encoder")

    @pytest.mark.parametrize(
        ("ids", "named"),
        [
            ([5] * 34, "'34 tokens': must have 35 to 2048"),
            ([5] * 2049, "'2049 tokens': must have 35 to 2048"),
            ([-1] * 40, "must be between 0 and"),
            ([10**9] * 40, "must be between 0 and"),
        ],
        ids=["too few", "too many", "negative", "unknown"],
    )
    def test_token_ids(self, caller: Caller, ids: list[int], named: str) -> None:
        message = refused(caller, {"INPUT_IDS": np.array([ids], np.int64)}, model="text_encoder")
        assert "INPUT_IDS = " in message
        assert named in message

    def test_an_encoder_error_is_not_cached(self, http_caller: Caller) -> None:
        """Else one failure of the encoder would go on to break every later request with that prompt."""
        ids = np.full((1, 40), 10**9 + 1, np.int64)
        for _ in range(2):
            refused(http_caller, {"INPUT_IDS": ids}, model="text_encoder")


def test_good_requests_went_on(traffic: GoodTraffic) -> None:
    """The traffic of this module was real: every good request was made, compared and packed with others meanwhile."""
    before = list(traffic.compared)
    wait_until(
        "another good picture each",
        lambda: bool(traffic.failures) or all(now > was for now, was in zip(traffic.compared, before, strict=True)),
    )
    traffic.check()
    assert min(traffic.in_packs) > 0
