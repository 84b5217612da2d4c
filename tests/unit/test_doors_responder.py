"""Exactly one answer, whatever happens; errors that tell clients what they may know; metrics that can be off."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import fake_pb_utils
import numpy as np
import pytest
from fake_pb_utils import InferenceRequest, InferenceResponse, Logger, MetricFamily, TritonError

from ditpack.engine.job import StepStats
from ditpack.errors import Cancelled, DeadlinePassed, GenerationFailed, InvalidRequest, Unavailable
from ditpack.tritonserver.isolation import answer_together
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.metrics import CacheMetrics, DecoderMetrics, EngineMetrics
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.responder import Responder
from ditpack.tritonserver.series import SERIES
from ditpack.tritonserver.tensors import Outputs, read_array, read_bytes, read_scalar


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    Logger.lines.clear()
    MetricFamily.series.clear()
    yield
    MetricFamily.enabled = True


def new_request(request_id: str = "r1") -> InferenceRequest:
    return InferenceRequest([], ["LATENTS"], request_id)


def code(request: InferenceRequest) -> str | None:
    assert len(request.answers) == 1
    error = request.answers[0].error()
    return error and TritonError.NAMES[error.code()]


def counted() -> dict[str, float]:
    return {
        dict(key)["outcome"]: value for key, value in MetricFamily.series["ditpack_requests_total"].items() if value
    }


def test_the_first_answer_counts() -> None:
    request = new_request()
    responder = Responder(request, Outcomes("dit"))
    assert responder.send(InferenceResponse([]))
    assert not responder.send(InferenceResponse([]))
    assert not responder.fail(GenerationFailed("too late"))
    del responder
    gc.collect()
    assert code(request) is None
    assert "ditpack_requests_total" in MetricFamily.series
    assert counted() == {}


def test_many_threads_get_one_answer_through() -> None:
    request = new_request()
    responder = Responder(request, Outcomes("dit"))
    start = threading.Barrier(8)
    sent: list[bool] = []

    def answer(index: int) -> None:
        start.wait(5)
        sent.append(responder.fail(Cancelled("x")) if index % 2 else responder.send(InferenceResponse([])))

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sum(sent) == 1
    assert len(request.answers) == 1


def test_a_dropped_responder_answers_with_an_error() -> None:
    request = new_request()
    responder = Responder(request, Outcomes("dit"))
    del responder
    gc.collect()
    assert code(request) == "INTERNAL"
    assert "without an answer" in request.answers[0].error().message()
    assert counted() == {"failed": 1}


def test_a_send_that_raises_still_leads_to_an_answer() -> None:
    request = new_request()
    request.send_failures = [MemoryError("no shared memory in /dev/shm/secret")]
    responder = Responder(request, Outcomes("dit"))
    assert responder.send(InferenceResponse([]))
    assert code(request) == "INTERNAL"
    assert "secret" not in request.answers[0].error().message()
    assert not responder.fail(Cancelled("x"))
    assert counted() == {"failed": 1}


def test_an_error_that_could_not_be_sent_is_sent_again_and_counted_once() -> None:
    request = new_request()
    request.send_failures = [RuntimeError("hiccup")]
    Responder(request, Outcomes("dit")).fail(Cancelled("x"))
    assert code(request) == "CANCELLED"
    assert counted() == {"cancelled": 1}


def test_a_sender_that_is_beyond_help_raises_nowhere_and_is_logged() -> None:
    request = new_request()
    request.send_failures = [RuntimeError("first"), RuntimeError("second")]
    responder = Responder(request, Outcomes("dit"))
    responder.fail(Cancelled("x"))
    assert not request.answers
    assert any("second" in line and '"r1"' in line for level, line in Logger.lines if level == "warn")


def test_a_responder_that_got_no_sender_leaves_the_error_to_execute() -> None:
    request = new_request()
    request.get_response_sender = lambda: (_ for _ in ()).throw(RuntimeError("no sender"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no sender"):
        Responder(request, Outcomes("dit"))
    gc.collect()
    assert not request.answers


@pytest.mark.parametrize(
    ("error", "triton", "outcome"),
    [
        (InvalidRequest("WIDTH", 65, "must be a multiple of 16"), "INVALID_ARG", "invalid"),
        (Unavailable("full"), "UNAVAILABLE", "unavailable"),
        (Cancelled("gone"), "CANCELLED", "cancelled"),
        (DeadlinePassed("late"), "CANCELLED", "deadline"),
        (GenerationFailed("broken"), "INTERNAL", "failed"),
    ],
)
def test_our_errors_keep_message_and_code(error: Exception, triton: str, outcome: str) -> None:
    answer = Outcomes("dit").failure("r1", error).error()
    assert (TritonError.NAMES[answer.code()], answer.message()) == (triton, str(error))
    assert counted() == {outcome: 1}
    line = json.loads(Logger.lines[-1][1])
    assert (line["event"], line["model"], line["id"], line["outcome"]) == ("request", "dit", "r1", outcome)


def test_an_unexpected_error_tells_the_client_its_type_and_the_log_everything() -> None:
    try:
        raise OSError("cannot read /srv/secret/model.safetensors")
    except OSError as error:
        answer = Outcomes("dit").failure("r1", error).error()
    assert TritonError.NAMES[answer.code()] == "INTERNAL"
    assert "OSError" in answer.message()
    assert "/" not in answer.message()
    level, line = Logger.lines[-1]
    assert level == "error"
    assert "/srv/secret/model.safetensors" in json.loads(line)["traceback"]
    assert "test_doors_responder.py" in json.loads(line)["traceback"]


def invalid_prompt() -> InvalidRequest:
    error = InvalidRequest("PROMPT", "my secret wish", "must not be so")
    error.__cause__ = ValueError("about a secret")
    return error


def test_prompts_stay_out_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DITPACK_LOG_PROMPTS", raising=False)
    outcomes = Outcomes("prepare")
    outcomes.accepted("r1", "my secret wish", "no secret")
    outcomes.failure("r1", invalid_prompt())
    assert json.loads(Logger.lines[-1][1])["field"] == "PROMPT"
    assert not any("secret" in line for _, line in Logger.lines)


def test_prompts_are_logged_where_that_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITPACK_LOG_PROMPTS", "1")
    outcomes = Outcomes("prepare")
    outcomes.accepted("r1", "my secret wish", None)
    outcomes.failure("r2", invalid_prompt())
    accepted, refused = (json.loads(line) for _, line in Logger.lines)
    assert accepted == {
        "event": "prompt", "model": "prepare", "id": "r1", "prompt": "my secret wish", "negative_prompt": None,
    }  # fmt: skip
    assert "my secret wish" in refused["message"]


def stats(**values: Any) -> StepStats:
    plain = {"requests": 1, "rows": 2, "tokens": 40, "waiting": 0, "seconds": 0.1}
    return StepStats(**plain | {"graph_replays": 1, "eager_forwards": 0, "pad_tokens": 8} | values)


def test_without_metrics_everything_else_works() -> None:
    MetricFamily.enabled = False
    outcomes = Outcomes("dit")
    metrics = EngineMetrics("dit_0_0")
    MetricFamily.enabled = True
    assert outcomes.failure("r1", Cancelled("x")).has_error()
    metrics.step(stats())
    metrics.denoised(1.0, 2.0, 3.0)
    assert not MetricFamily.series


def test_a_triton_without_histograms_has_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(MetricFamily, "HISTOGRAM")
    metrics = EngineMetrics("dit_0_0")
    metrics.step(stats())
    metrics.denoised(1.0, 2.0, 3.0)
    DecoderMetrics().decoded(1.0, 2.0)
    CacheMetrics("text_encoder")
    Outcomes("dit")
    assert set(MetricFamily.series) == {name for name, series in SERIES.items() if series.kind != "HISTOGRAM"}


def test_metrics_add_up() -> None:
    metrics = EngineMetrics("dit_0_0")
    decoder = DecoderMetrics()
    caches = {model: CacheMetrics(model) for model in ("text_encoder", "vae_encoder")}
    gc.collect()  # a family that nobody holds would be gone by now
    metrics.step(stats())
    metrics.step(stats(requests=3, rows=5, tokens=100, waiting=7, graph_replays=0, eager_forwards=2, pad_tokens=0))
    engine = (("engine", "dit_0_0"),)
    assert MetricFamily.series["ditpack_active_rows"] == {engine: 5}
    assert MetricFamily.series["ditpack_waiting_requests"] == {engine: 7}
    metrics.load(0, 0, 0)
    metrics.denoised(encode_s=0.5, queue_s=2.0, denoise_s=8.0)
    decoder.decoded(decode_s=0.25, total_s=10.75)
    for hits, misses in ((0, 2), (3, 1)):
        caches["text_encoder"].answered(hits, misses)
    Outcomes("dit")
    series = {name: list(values.items()) for name, values in MetricFamily.series.items()}
    assert series.keys() == SERIES.keys(), "what the table names and what is made differ"
    series.pop("ditpack_requests_total")
    text, photos = ((("model", model),) for model in caches)
    assert series == {
        "ditpack_cache_hits_total": [(text, 3), (photos, 0)],
        "ditpack_cache_misses_total": [(text, 3), (photos, 0)],
        "ditpack_steps_total": [(engine, 2)],
        "ditpack_step_requests_total": [((), 4)],
        "ditpack_shared_steps_total": [((), 1)],
        "ditpack_step_tokens_total": [((), 140)],
        "ditpack_step_seconds_total": [((), 0.2)],
        "ditpack_graph_replays_total": [((), 1)],
        "ditpack_eager_forwards_total": [((), 2)],
        "ditpack_active_requests": [(engine, 0)],
        "ditpack_active_rows": [(engine, 0)],
        "ditpack_waiting_requests": [(engine, 0)],
        "ditpack_step_seconds": [((), 0.2)],
        "ditpack_step_tokens": [((), 140)],
        "ditpack_step_pad_tokens": [((), 8)],
        "ditpack_stage_seconds": [
            ((("stage", stage),), seconds)
            for stage, seconds in (("encode", 0.5), ("queue", 2.0), ("denoise", 8.0), ("decode", 0.25))
        ],
        "ditpack_time_to_first_step_seconds": [((), 2.5)],
        "ditpack_request_seconds": [((), 10.75)],
    }


def test_the_packages_log_reaches_triton_once() -> None:
    route_logs()
    route_logs()
    logging.getLogger("ditpack.attention").info("attention backend: %s", "sdpa")
    assert Logger.lines == [("info", "attention backend: sdpa")]


OUTPUTS = Outputs({"output": [{"name": "LATENTS", "data_type": "TYPE_FP32", "dims": ["-1", "4"]}]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"LATENT": np.zeros((2, 4), np.float32)}, "was requested but not made"),
        ({"LATENTS": np.zeros((2, 4), np.float32), "X": np.zeros(1)}, "X is not in config.pbtxt"),
        ({"LATENTS": np.zeros((2, 4), np.float64)}, r"LATENTS is float64\[2, 4\], config.pbtxt says float32\[-1, 4\]"),
        ({"LATENTS": np.zeros((2, 5), np.float32)}, "config.pbtxt says"),
        ({"LATENTS": np.zeros((1, 2, 4), np.float32)}, "config.pbtxt says"),
    ],
)
def test_outputs_that_triton_would_pass_on_wrong_are_refused(values: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OUTPUTS.response(values, ["LATENTS"])


def test_outputs_get_the_batch_dimension_and_only_if_asked_for() -> None:
    latents = np.arange(8, dtype=np.float32).reshape(4, 2).T  # not contiguous
    response = OUTPUTS.response({"LATENTS": latents}, ["LATENTS"])
    assert response.output_tensors()[0].as_numpy().shape == (1, 2, 4)
    assert response.output_tensors()[0].as_numpy().flags.c_contiguous
    assert OUTPUTS.response({"LATENTS": latents}, []).output_tensors() == []


def test_inputs_are_read_strictly() -> None:
    arrays = {"ONE": np.array([[7]]), "TWO": np.array([[7, 8]]), "NONE": np.zeros((1, 0), np.int64)}
    text = np.array([[b"\xff\x00"]], dtype=np.object_)
    request = InferenceRequest([*(fake_pb_utils.Tensor(n, a) for n, a in arrays.items())], [], "r1")
    request.inputs().append(fake_pb_utils.Tensor("TEXT", text))
    assert read_scalar(request, "ONE") == 7
    assert type(read_scalar(request, "ONE")) is int
    assert read_scalar(request, "TEXT") == b"\xff\x00"
    assert read_scalar(request, "ABSENT") is None
    for name, shape in (("TWO", "[1, 2]"), ("NONE", "[1, 0]")):
        with pytest.raises(InvalidRequest) as error:
            read_scalar(request, name)
        assert str(error.value).startswith(f"{name} = {shape}: must have exactly one element")
    for name in ("ABSENT", "ONE"):
        with pytest.raises(InvalidRequest, match=name):
            read_bytes(request, name)
    copied = read_array(request, "ONE")
    arrays["ONE"][...] = 0
    assert copied.tolist() == [7]
    with pytest.raises(InvalidRequest, match="ABSENT"):
        read_array(request, "ABSENT")


def test_two_images_in_one_request_are_refused() -> None:
    request = InferenceRequest([fake_pb_utils.Tensor("EMBEDS", np.zeros((2, 3, 4), np.float32))], [], "r1")
    with pytest.raises(InvalidRequest, match="one request makes one image"):
        read_array(request, "EMBEDS")


def together(values: list[int], run) -> tuple[list[str], list[int]]:
    """Answer one request a value through ``answer_together``; its answers, and the size of each ``run``."""
    requests = [InferenceRequest([], [], str(value)) for value in values]
    sizes: list[int] = []

    def counted_run(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return run(items)

    def read(request: InferenceRequest) -> int:
        value = int(request.request_id())
        if value < 0:
            raise InvalidRequest("VALUE", value, "must not be negative")
        return value

    def write(item: int, made: int) -> InferenceResponse:
        if made == 500:
            raise RuntimeError("cannot write")
        return InferenceResponse([fake_pb_utils.Tensor("Y", np.array([made]))])

    responses = answer_together(requests, Outcomes("m"), read=read, run=counted_run, write=write)
    shown = [r.error().message()[:14] if r.has_error() else str(r.output_tensors()[0].as_numpy()[0]) for r in responses]
    return shown, sizes


def test_one_bad_request_costs_its_batch_nothing() -> None:
    assert together([1, -2, 3], lambda items: [10 * item for item in items]) == (["10", "VALUE = -2: mu", "30"], [2])
    assert together([1, 50, 3], lambda items: [10 * item for item in items]) == (["10", "internal error", "30"], [3])
    assert together([-1], lambda items: items) == (["VALUE = -1: mu"], [])


def test_when_the_batch_raises_each_request_runs_alone() -> None:
    def run(items: list[int]) -> list[int]:
        if 2 in items:
            raise RuntimeError("two")
        return items

    assert together([1, 2, 3], run) == (["1", "internal error", "3"], [3, 1, 1, 1])
    assert any("a batch of 3 failed" in line for level, line in Logger.lines if level == "warn")


def test_a_result_too_few_is_noticed() -> None:
    assert together([1, 2], lambda items: items[:1])[0] == ["1", "2"]
    assert together([1], lambda items: [])[0] == ["internal error"]
