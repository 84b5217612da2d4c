"""qwen_image_stream's door: events of a real engine, one ending for each request, cancels when the client is gone."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_pb_utils
import numpy as np
import pytest
from engine_tools import TIMEOUT, Ticket, engine, request, tiny_sampler
from fake_pb_utils import InferenceRequest, InferenceResponse, Tensor, TritonError
from fake_triton import Answer, FakeModel

from ditpack.engine import channel
from ditpack.engine.channel import EngineChannel
from ditpack.engine.engine import Engine
from ditpack.engine.job import Job, Result
from ditpack.errors import Unavailable
from ditpack.sampling.qwen_image import QwenImageSampler

PICTURE = base64.b64encode(b"a preview").decode()


class Ensemble:
    """Stands for qwen_image: a request's steps in a real engine, then an image."""

    def __init__(self, served: Engine) -> None:
        self.served = served
        self.seen: list[InferenceRequest] = []
        self.error: TritonError | None = None

    def __call__(self, asked: InferenceRequest) -> InferenceResponse:
        self.seen.append(asked)
        values = {tensor.name(): tensor.as_numpy()[0] for tensor in asked.inputs()}
        if self.error is not None:
            return InferenceResponse(error=self.error)
        ticket = Ticket(request(seed=1, num_inference_steps=int(values["NUM_INFERENCE_STEPS"])))
        job = ticket.job
        self.served.submit(Job(job.request, asked.request_id(), job.conditioning, job.deliver))
        outcome = ticket.outcome()
        if not isinstance(outcome, Result):
            # 2.51 makes INTERNAL of every code on this way.
            return InferenceResponse(error=TritonError(f"in ensemble 'qwen_image', {outcome}", TritonError.INTERNAL))
        outputs = {"IMAGE": np.array([b"an image"], np.object_), "SEED_USED": np.array([1]), "INFO": np.array([b"{}"])}
        outputs["INFO"] = outputs["INFO"].astype(np.object_)
        return InferenceResponse([Tensor(name, outputs[name]) for name in asked.requested_output_names()])


@pytest.fixture(scope="module")
def sampler(tiny_checkpoint: Path) -> QwenImageSampler:
    return tiny_sampler(tiny_checkpoint)


@pytest.fixture
def ensemble(sampler: QwenImageSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ensemble]:
    monkeypatch.setenv(channel.DIRECTORY_VARIABLE, str(tmp_path))
    served = engine(sampler)
    opened = EngineChannel(served, tmp_path, "dit_0_0", lambda latents: PICTURE)
    made = Ensemble(served)
    monkeypatch.setitem(InferenceRequest.models, "qwen_image", made)
    fake_pb_utils.MetricFamily.series.clear()
    yield made
    served.close(TIMEOUT)
    opened.close()


def new_request(model: FakeModel, request_id: str = "", **values: Any) -> InferenceRequest:
    values = {"PROMPT": b"a red kite", "NUM_INFERENCE_STEPS": 6} | values
    dtypes = {bytes: np.object_, int: np.int32}
    arrays = {name: np.array([value], dtypes[type(value)]) for name, value in values.items()}
    return model.request(arrays, request_id=request_id)


def events(answers: list[Answer]) -> list[dict[str, Any]]:
    return [json.loads(answer.outputs["EVENT"][0]) for answer in answers if answer.code is None]


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_the_story_of_an_image(ensemble: Ensemble) -> None:
    model = FakeModel("qwen_image_stream")
    answers = model.stream(new_request(model, PREVIEW_EVERY=4, NUM_INFERENCE_STEPS=12))
    told = events(answers)
    assert len(told) == len(answers)
    assert told[0] == {"event": "queued", "id": told[0]["id"], "position": None}
    assert told[-1] == {"event": "image", "id": told[0]["id"]}
    steps = [each for each in told if each["event"] == "step"]
    assert steps
    assert [each["step"] for each in steps] == sorted({each["step"] for each in steps})
    for each in steps:
        assert each["steps"] == 12
        assert each["remaining_s"] == pytest.approx(each["seconds_per_step"] * (12 - each["step"]), abs=0.02)
    previews = [
        answer.outputs["IMAGE"][0] for answer, each in zip(answers, told, strict=True) if each["event"] == "preview"
    ]
    assert previews
    assert set(previews) == {b"a preview"}
    assert answers[-1].outputs["IMAGE"][0] == b"an image"
    assert answers[-1].outputs["SEED_USED"][0] == 1


def test_the_ensemble_gets_the_request_but_not_what_is_the_streams(ensemble: Ensemble) -> None:
    model = FakeModel("qwen_image_stream")
    request = new_request(model, "0123456789abcdef", PREVIEW_EVERY=5, RESPONSE_FORMAT=b"b64_json")
    request.timeout_us = 1_500_000
    model.stream(request)
    (seen,) = ensemble.seen
    assert seen.timeout() == 1_500_000
    assert seen.request_id() == "0123456789abcdef"
    assert {tensor.name() for tensor in seen.inputs()} == {"PROMPT", "NUM_INFERENCE_STEPS", "RESPONSE_FORMAT"}
    assert seen.requested_output_names() == ["IMAGE", "SEED_USED", "INFO"]


@pytest.mark.parametrize("request_id", ["", "1", "fifteen letters"])
def test_an_id_that_others_could_guess_is_replaced(ensemble: Ensemble, request_id: str) -> None:
    model = FakeModel("qwen_image_stream")
    ids = {events(model.stream(new_request(model, request_id)))[0]["id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(len(each) == 32 for each in ids)


def test_previews_as_text(ensemble: Ensemble) -> None:
    model = FakeModel("qwen_image_stream")
    answers = model.stream(new_request(model, PREVIEW_EVERY=2, NUM_INFERENCE_STEPS=8, RESPONSE_FORMAT=b"b64_json"))
    previews = [a.outputs["IMAGE"][0] for a in answers[:-1] if "IMAGE" in a.outputs]
    assert previews
    assert set(previews) == {PICTURE.encode()}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"OUTPUT_FORMAT": b"raw"}, "OUTPUT_FORMAT = 'raw': must be png, jpeg or webp in a stream"),
        ({"PREVIEW_EVERY": -3}, "PREVIEW_EVERY = -3"),
    ],
)
def test_what_it_refuses_never_reaches_the_ensemble(ensemble: Ensemble, values: dict[str, Any], message: str) -> None:
    model = FakeModel("qwen_image_stream")
    (answer,) = model.stream(new_request(model, **values))
    assert answer.code == "INVALID_ARG"
    assert message in answer.message
    assert not ensemble.seen


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("in ensemble 'qwen_image', WIDTH = 65: must be a multiple of 16", "INVALID_ARG"),
        ("in ensemble 'qwen_image', DEADLINE_MS = 5: the deadline passed after 1 of 2 steps", "CANCELLED"),
        ("in ensemble 'qwen_image', Exceeds maximum queue size", "UNAVAILABLE"),
        ("in ensemble 'qwen_image', full: 4 requests still wait after 300 s; try again later", "UNAVAILABLE"),
        ("in ensemble 'qwen_image', Request timeout expired", "UNAVAILABLE"),
        ("something else", "INTERNAL"),
    ],
)
def test_an_error_of_the_ensemble_ends_the_stream_with_its_code(ensemble: Ensemble, message: str, code: str) -> None:
    ensemble.error = TritonError(message, TritonError.INTERNAL)
    model = FakeModel("qwen_image_stream")
    answers = model.stream(new_request(model))
    assert [answer.code for answer in answers] == [None, code]
    assert "ensemble" not in answers[-1].message


def test_a_client_that_is_gone_cancels(ensemble: Ensemble) -> None:
    model = FakeModel("qwen_image_stream")
    asked = new_request(model, NUM_INFERENCE_STEPS=5000)
    threading.Timer(0.5, setattr, (asked, "cancelled", True)).start()
    began = time.monotonic()
    answers = model.stream(asked)
    assert time.monotonic() - began < 20
    assert answers[-1].code == "CANCELLED"
    assert "cancelled by its id after" in answers[-1].message
    assert ensemble.served.active_requests == 0


@pytest.mark.parametrize("fails", [1, 2])
def test_a_send_that_fails_still_ends_the_stream(ensemble: Ensemble, fails: int) -> None:
    """The first to fail is an event, the second the error that takes its place."""
    model = FakeModel("qwen_image_stream")
    asked = new_request(model)
    asked.send_failures = [RuntimeError("shared memory is full") for _ in range(fails)]
    answers = model.stream(asked)
    assert [answer.code for answer in answers] == ["INTERNAL"]


def test_requests_of_one_call_do_not_wait_for_each_other(ensemble: Ensemble) -> None:
    model = FakeModel("qwen_image_stream")
    requests = [new_request(model, NUM_INFERENCE_STEPS=steps, PREVIEW_EVERY=4) for steps in (9, 5, 7)]
    bad = new_request(model, PREVIEW_EVERY=-1)
    model._execute([*requests, bad])
    for asked in requests:
        answers = [model._read(response, asked) for response in asked.answers]
        assert events(answers)[-1]["event"] == "image"
        assert len({each["id"] for each in events(answers)}) == 1
    assert len(bad.answers) == 1


def test_nothing_watches_when_the_stream_is_over(ensemble: Ensemble) -> None:
    """Requests that never reach an engine leave no watcher there."""
    ensemble.error = TritonError("WIDTH = 65: must be a multiple of 16", TritonError.INVALID_ARG)
    before = threading.active_count()
    model = FakeModel("qwen_image_stream")
    for _ in range(5):
        model.stream(new_request(model))
    assert eventually(lambda: threading.active_count() <= before + 1)  # one of asyncio's own may idle


def test_a_server_that_shuts_down_says_so(ensemble: Ensemble) -> None:
    ensemble.error = TritonError("the server is shutting down", TritonError.INTERNAL)
    model = FakeModel("qwen_image_stream")
    assert model.stream(new_request(model))[-1].code == Unavailable.code
