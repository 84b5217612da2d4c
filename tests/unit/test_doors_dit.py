"""dit's door and its engine: admission, back-pressure, and one answer for each request however the engine behaves."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fake_pb_utils
import numpy as np
import pytest
import torch
from fake_pb_utils import InferenceRequest, MetricFamily
from fake_triton import Answer, FakeModel, triton_args

from ditpack.engine.job import Job, Result
from ditpack.errors import DitpackError, GenerationFailed, InvalidRequest, Unavailable
from ditpack.request import Limits, resolve, resolve_json
from ditpack.sampling.qwen_image import QwenImageSampler
from ditpack.tritonserver.dit_door import DitDoor
from ditpack.tritonserver.metrics import EngineMetrics
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.parameters import Instance
from ditpack.tritonserver.tensors import Outputs

LIMITS = Limits(default_width=64, default_height=32, min_size=32)
INFO = {"queue_ms": 1.23456, "denoise_ms": 2.0, "steps": 3, "pack": {"requests_max": 1}}
LATENTS = torch.arange(24, dtype=torch.float32).reshape(3, 2, 4)
DONE = Result(LATENTS, INFO)


class StubEngine:
    """``on_submit`` decides what becomes of a job; by default it is done at once."""

    def __init__(self, on_submit: Callable[[Job], None] | None = None) -> None:
        self.submitted: list[Job] = []
        self.on_submit = on_submit or (lambda job: job.deliver(DONE))
        self.healthy = True
        self.active_requests = self.active_rows = self.waiting_requests = 0
        self.closed: list[float] = []

    def submit(self, job: Job) -> None:
        self.on_submit(job)
        self.submitted.append(job)

    def close(self, timeout: float) -> None:
        self.closed.append(timeout)


def new_dit(engine: Any, queue_timeout_s: float = 30.0) -> FakeModel:
    MetricFamily.series.clear()
    fake_pb_utils.Logger.lines.clear()
    outputs = Outputs(Instance.from_args(triton_args("dit")).config)
    door = DitDoor(
        engine,
        None,
        partial(resolve_json, limits=LIMITS, resolver=resolve),
        QwenImageSampler.conditioning,
        queue_timeout_s,
        outputs,
        Outcomes("dit"),
        EngineMetrics("dit_0_0"),
    )
    return FakeModel("dit", instance=door)


def new_request(
    model: FakeModel, request_id: str = "r", outputs: list[str] | None = None, **values: Any
) -> InferenceRequest:
    resolved = resolve({"PROMPT": "a red kite", "SEED": 7} | values, LIMITS)
    embeds = np.full((5, 4), 0.5, np.float32)
    inputs = {"REQUEST": np.array([resolved.to_json().encode()], np.object_)}
    return model.request(inputs | {"EMBEDS": embeds, "NEGATIVE_EMBEDS": -embeds[:3]}, outputs, request_id)


def metric(name: str) -> float:
    return sum(MetricFamily.series[name].values())


def test_a_job_carries_the_request_and_its_own_copy_of_the_features() -> None:
    model = new_dit(StubEngine())
    (answer,) = model.infer(new_request(model, "id 7", DEADLINE_MS=60_000))
    assert np.array_equal(answer.outputs["LATENTS"], LATENTS.numpy())
    (job,) = model.instance._engine.submitted
    assert (job.request_id, job.request.prompt, job.request.deadline_ms) == ("id 7", "a red kite", 60_000)
    assert job.conditioning.prompt_embeds.tolist() == [[0.5] * 4] * 5  # the fake has overwritten the input by now
    assert job.conditioning.negative_prompt_embeds is not None
    assert job.conditioning.negative_prompt_embeds.tolist() == [[-0.5] * 4] * 3


def test_without_guidance_the_negative_features_are_left_out() -> None:
    model = new_dit(StubEngine())
    model.infer(new_request(model, TRUE_CFG_SCALE=1.0))
    assert model.instance._engine.submitted[0].conditioning.negative_prompt_embeds is None


def test_execute_returns_before_the_answers_which_come_in_any_order() -> None:
    model = new_dit(StubEngine(lambda job: None))
    requests = [new_request(model, str(index)) for index in range(3)]
    model.execute(requests)
    assert not any(request.answers for request in requests)
    for index in (2, 0, 1):
        model.instance._engine.submitted[index].deliver(DONE)
        assert model.answer(requests[index]).code is None
    assert sum(len(request.answers) for request in requests) == 3


def misbehave(how: str) -> Callable[[Job], None]:
    def on_submit(job: Job) -> None:
        if job.request_id != "bad":
            job.deliver(DONE)
        elif how == "deliver twice":
            job.deliver(DONE)
            job.deliver(GenerationFailed("again"))
        elif how == "fail then deliver":
            job.deliver(GenerationFailed("this one broke"))
            job.deliver(DONE)
        elif how == "raise after delivering":
            job.deliver(DONE)
            raise RuntimeError("in /secret/place.py")
        elif how == "raise":
            raise RuntimeError("in /secret/place.py")
        elif how == "refuse":
            raise InvalidRequest("EMBEDS", [5, 4], "must have shape [L, 8]")
        elif how == "wrong result":
            job.deliver(Result(LATENTS[0], INFO))
        elif how == "wrong dtype":
            job.deliver(Result(LATENTS.double(), INFO))

    return on_submit


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("deliver twice", None, ""),
        ("fail then deliver", "INTERNAL", "this one broke"),
        ("raise after delivering", None, ""),
        ("raise", "INTERNAL", "RuntimeError"),
        ("refuse", "INVALID_ARG", "EMBEDS = [5, 4]: must have shape"),
        ("wrong result", "INTERNAL", "ValueError"),
        ("wrong dtype", "INTERNAL", "ValueError"),
        ("drop", "INTERNAL", "without an answer"),
    ],
)
def test_every_request_gets_one_answer_whatever_the_engine_does(how: str, code: str | None, message: str) -> None:
    model = new_dit(StubEngine(misbehave(how)))
    requests = [new_request(model, name) for name in ("good", "bad", "fine")]
    model.execute(requests)
    model.instance._engine.submitted.clear()
    gc.collect()
    good, bad, fine = (model.answer(request) for request in requests)
    assert (good.code, bad.code, fine.code) == (None, code, None)
    assert message in bad.message
    assert "/" not in bad.message
    assert metric("ditpack_requests_total") == (1 if code else 0)


def test_a_send_that_fails_once_becomes_an_error_answer() -> None:
    model = new_dit(StubEngine())
    request = new_request(model)
    request.send_failures = [RuntimeError("shared memory is full")]
    (answer,) = model.infer(request)
    assert answer.code == "INTERNAL"


def test_cancellation_is_asked_of_the_sender() -> None:
    model = new_dit(StubEngine(lambda job: None))
    request = new_request(model)
    model.execute([request])
    (job,) = model.instance._engine.submitted
    assert not job.is_cancelled()
    request.cancelled = True
    assert job.is_cancelled()
    job.deliver(GenerationFailed("end"))


def test_a_full_engine_refuses_one_and_takes_the_others() -> None:
    def full(job: Job) -> None:
        if job.request_id == "1":
            raise Unavailable("full: 4 requests wait, max_queue_size is 4; try again later")
        job.deliver(DONE)

    model = new_dit(StubEngine(full))
    answers = model.infer(*(new_request(model, str(index)) for index in range(3)))
    assert [answer.code for answer in answers] == [None, "UNAVAILABLE", None]
    assert answers[1].message == "full: 4 requests wait, max_queue_size is 4; try again later"


@pytest.mark.parametrize(("timeout_us", "allowed"), [(0, 30.0), (1_500_000, 1.5), (60_000_000, 30.0)])
def test_a_clients_timeout_may_shorten_the_wait(timeout_us: int, allowed: float) -> None:
    model = new_dit(StubEngine(), queue_timeout_s=30.0)
    request = new_request(model)
    request.timeout_us = timeout_us
    model.infer(request)
    assert model.instance._engine.submitted[0].timeout_s == allowed


def test_a_dead_engine_refuses_at_once() -> None:
    def dead(job: Job) -> None:
        raise Unavailable("the engine stopped (RuntimeError); the server has to be restarted")

    engine = StubEngine(dead)
    engine.healthy = False
    model = new_dit(engine)
    started = time.monotonic()
    answers = model.infer(*(new_request(model, str(index)) for index in range(3)))
    assert time.monotonic() - started < 1
    assert [answer.code for answer in answers] == ["UNAVAILABLE"] * 3
    assert "has to be restarted" in answers[0].message


def test_the_load_gauges_fall_to_zero_with_the_last_answer() -> None:
    engine = StubEngine()
    model = new_dit(engine)
    engine.active_requests, engine.waiting_requests = 2, 1
    model.infer(new_request(model))
    assert (metric("ditpack_active_requests"), metric("ditpack_waiting_requests")) == (2, 1)
    engine.active_requests = engine.waiting_requests = 0
    model.infer(new_request(model))
    assert (metric("ditpack_active_requests"), metric("ditpack_waiting_requests")) == (0, 0)


def test_finalize_closes_the_engine_within_bounds() -> None:
    engine = StubEngine()
    new_dit(engine).instance.finalize()
    assert len(engine.closed) == 1
    assert 0 < engine.closed[0] < 30, "tritonserver gives up after 30 s by default"


# The real engine behind the real door.


def loaded_dit(checkpoint: Path, **parameters: str) -> FakeModel:
    MetricFamily.series.clear()
    return FakeModel("dit", {"checkpoint": str(checkpoint)} | parameters)


def real_request(model: FakeModel, request_id: str, **values: Any) -> InferenceRequest:
    width = model.instance._door._engine._sampler.transformer.config.joint_attention_dim
    resolved = resolve({"PROMPT": "a red kite", "SEED": 7, "WIDTH": 32, "HEIGHT": 32} | values, LIMITS)
    embeds = np.random.default_rng(0).standard_normal((5, width)).astype(np.float32)
    inputs = {"REQUEST": np.array([resolved.to_json().encode()], np.object_)}
    return model.request(inputs | {"EMBEDS": embeds, "NEGATIVE_EMBEDS": embeds[:3]}, None, request_id)


def ok(answer: Answer) -> np.ndarray:
    assert answer.code is None, answer.message
    return answer.outputs["LATENTS"]


def test_requests_of_different_batches_share_steps_and_metrics_say_so(tiny_checkpoint: Path) -> None:
    model = loaded_dit(tiny_checkpoint)
    requests = [real_request(model, str(index), NUM_INFERENCE_STEPS=40 + index) for index in range(4)]
    for request in requests:
        model.execute([request])
    latents = [ok(model.answer(request)) for request in requests]
    assert all(np.isfinite(array).all() for array in latents)
    assert metric("ditpack_shared_steps_total") > 0
    assert metric("ditpack_step_requests_total") == 40 + 41 + 42 + 43
    assert metric("ditpack_step_tokens_total") > metric("ditpack_step_requests_total") >= metric("ditpack_steps_total")
    model.instance.finalize()
    assert metric("ditpack_active_requests") == 0


def test_finalize_answers_everybody(tiny_checkpoint: Path) -> None:
    model = loaded_dit(tiny_checkpoint)
    requests = [real_request(model, str(index), NUM_INFERENCE_STEPS=5) for index in range(6)]
    model.execute(requests)
    model.instance.finalize()
    for request in requests:
        ok(model.answer(request))
    (answer,) = model.infer(real_request(model, "late"))
    assert answer.code == "UNAVAILABLE"


def test_a_crash_of_the_engine_answers_everybody(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded_dit(tiny_checkpoint, max_queue_size="2", token_budget="64")
    engine = model.instance._door._engine

    def crash(*_: Any) -> None:
        raise SystemExit("out of nowhere")

    monkeypatch.setattr(engine, "_run", crash)
    requests = [real_request(model, str(index)) for index in range(6)]
    started = time.monotonic()
    answers = model.infer(*requests)
    assert time.monotonic() - started < 10
    assert [answer.code for answer in answers] == ["UNAVAILABLE"] * 6
    assert metric("ditpack_requests_total") == 6


def test_what_is_too_much_is_refused_and_the_rest_gets_through(tiny_checkpoint: Path) -> None:
    model = loaded_dit(tiny_checkpoint, max_queue_size="3", token_budget="64")
    answers = model.infer(*(real_request(model, str(index), NUM_INFERENCE_STEPS=50) for index in range(12)))
    refused = [answer for answer in answers if answer.code is not None]
    assert refused
    assert {answer.code for answer in refused} == {"UNAVAILABLE"}
    assert all("requests wait, max_queue_size is 3" in answer.message for answer in refused)
    for answer in answers:
        if answer.code is None:
            ok(answer)
    model.instance.finalize()


def test_outcome_types_cover_the_contract() -> None:
    """``deliver`` takes a Result or a DitpackError, nothing else is promised."""
    model = new_dit(StubEngine(lambda job: job.deliver(DitpackError("plain"))))
    (answer,) = model.infer(new_request(model))
    assert (answer.code, answer.message) == ("INTERNAL", "plain")
