"""The stream and the control model: progress, previews and cancels of requests over the same steps as everybody's."""

from __future__ import annotations

import base64
import http.client
import io
import json
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from PIL import Image
from server_tools import TIMEOUT, metric, wait_until
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer

pytestmark = pytest.mark.server

LONG = {"WIDTH": 128, "HEIGHT": 128, "NUM_INFERENCE_STEPS": 200}  # seconds, on a CPU


def post(server: TritonServer, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=TIMEOUT)
    connection.request("POST", path, json.dumps(body))
    return connection, connection.getresponse()


def events(response: Any) -> Iterator[dict[str, Any]]:
    """Server-sent events: each the JSON of a response's outputs, or {"error"}."""
    for line in response:
        if line.startswith(b"data:"):
            yield json.loads(line[5:])


def stream(server: TritonServer, **values: Any) -> list[dict[str, Any]]:
    body = {"PROMPT": "a red apple", "WIDTH": 64, "HEIGHT": 64, "RESPONSE_FORMAT": "b64_json", **values}
    connection, response = post(server, "/v2/models/qwen_image_stream/generate_stream", body)
    try:
        return list(events(response))
    finally:
        connection.close()


def control(server: TritonServer, **values: Any) -> dict[str, Any]:
    connection, response = post(server, "/v2/models/control/generate", values)
    try:
        answer = json.load(response)
        return json.loads(answer["ANSWER"]) if "ANSWER" in answer else answer
    finally:
        connection.close()


def test_progress_previews_and_the_image(server: TritonServer) -> None:
    told = stream(server, NUM_INFERENCE_STEPS=12, SEED=5, PREVIEW_EVERY=4)
    kinds = [json.loads(each["EVENT"])["event"] for each in told]
    assert kinds[0] == "queued"
    assert kinds[-1] == "image"
    assert "step" in kinds
    ids = {json.loads(each["EVENT"])["id"] for each in told}
    assert len(ids) == 1
    assert len(ids.pop()) >= 16
    steps = [json.loads(each["EVENT"]) for each in told if json.loads(each["EVENT"])["event"] == "step"]
    assert [each["step"] for each in steps] == sorted({each["step"] for each in steps})
    assert {each["steps"] for each in steps} == {12}
    assert told[-1]["SEED_USED"] == 5
    image = Image.open(io.BytesIO(base64.b64decode(told[-1]["IMAGE"])))
    assert image.size == (64, 64)
    # The same picture as the ensemble's.
    body = {"PROMPT": "a red apple", "WIDTH": 64, "HEIGHT": 64, "NUM_INFERENCE_STEPS": 12, "SEED": 5}
    connection, response = post(server, "/v2/models/qwen_image/generate", body | {"RESPONSE_FORMAT": "b64_json"})
    assert json.load(response)["IMAGE"] == told[-1]["IMAGE"]
    connection.close()


def test_previews_are_small_jpegs(server: TritonServer) -> None:
    told = stream(server, PREVIEW_EVERY=5, **LONG)
    previews = [each for each in told if json.loads(each["EVENT"])["event"] == "preview"]
    assert previews
    for each in previews:
        assert json.loads(each["EVENT"])["step"] % 5 == 0
        image = Image.open(io.BytesIO(base64.b64decode(each["IMAGE"])))
        assert image.format == "JPEG"
        assert 64 <= min(image.size) <= 128


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"OUTPUT_FORMAT": "raw"}, "OUTPUT_FORMAT = 'raw': must be png, jpeg or webp"),
        ({"PREVIEW_EVERY": -1}, "PREVIEW_EVERY = -1: must be between 0"),
        ({"WIDTH": 65}, "WIDTH = 65"),
        ({"PROMPT": " "}, "PROMPT = ' ': must not be blank"),
        ({"DEADLINE_MS": 1}, "DEADLINE_MS = 1: the deadline passed"),
    ],
)
def test_errors_end_the_stream(server: TritonServer, values: dict[str, Any], message: str) -> None:
    assert message in stream(server, NUM_INFERENCE_STEPS=2, **values)[-1]["error"]


def test_errors_keep_their_code_over_grpc(server: TritonServer) -> None:
    error = grpc_stream(server, WIDTH=65)[-1]
    assert isinstance(error, InferenceServerException)
    assert "WIDTH = 65" in str(error)


def grpc_stream(server: TritonServer, **values: Any) -> list[Any]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    told: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        client.async_stream_infer("qwen_image_stream", inputs(**values), enable_empty_final_response=False)
        while True:
            told.append(answers.get(timeout=TIMEOUT))
            if isinstance(told[-1], InferenceServerException) or told[-1].as_numpy("SEED_USED") is not None:
                return told


def inputs(prompt: str = "a red apple", **values: int) -> list[tritonclient.grpc.InferInput]:
    made = [tritonclient.grpc.InferInput("PROMPT", [1], "BYTES")]
    made[0].set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    for name, value in values.items():
        made.append(tritonclient.grpc.InferInput(name, [1], "INT32"))
        made[-1].set_data_from_numpy(np.array([value], dtype=np.int32))
    return made


def test_a_grpc_stream_brings_bytes(server: TritonServer) -> None:
    told = grpc_stream(server, WIDTH=64, HEIGHT=64, NUM_INFERENCE_STEPS=6)
    assert json.loads(told[0].as_numpy("EVENT")[0])["event"] == "queued"
    assert Image.open(io.BytesIO(told[-1].as_numpy("IMAGE")[0])).size == (64, 64)


def idle(server: TritonServer) -> bool:
    return metric(server, "ditpack_active_requests") == 0 and metric(server, "ditpack_waiting_requests") == 0


def test_hanging_up_cancels(server: TritonServer) -> None:
    steps, cancelled = (
        metric(server, "ditpack_steps_total"),
        metric(server, "ditpack_requests_total", outcome="cancelled"),
    )
    body = {"PROMPT": "a red apple", "RESPONSE_FORMAT": "b64_json", **LONG}
    connection, response = post(server, "/v2/models/qwen_image_stream/generate_stream", body)
    for each in events(response):
        if json.loads(each["EVENT"])["event"] == "step":
            break
    connection.close()
    wait_until(
        "the request is cancelled",
        lambda: idle(server) and metric(server, "ditpack_requests_total", outcome="cancelled") > cancelled,
    )
    assert metric(server, "ditpack_steps_total") - steps < LONG["NUM_INFERENCE_STEPS"]


def test_a_grpc_stream_that_is_cancelled_cancels(server: TritonServer) -> None:
    cancelled = metric(server, "ditpack_requests_total", outcome="cancelled")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    client.start_stream(callback=lambda result, error: answers.put(error or result))
    client.async_stream_infer("qwen_image_stream", inputs(**LONG))
    while json.loads(answers.get(timeout=TIMEOUT).as_numpy("EVENT")[0])["event"] != "step":
        pass
    client.stop_stream(cancel_requests=True)
    client.close()
    wait_until(
        "the request is cancelled",
        lambda: idle(server) and metric(server, "ditpack_requests_total", outcome="cancelled") > cancelled,
    )


def test_cancel_by_id_of_a_stream(server: TritonServer) -> None:
    body = {"PROMPT": "a red apple", "RESPONSE_FORMAT": "b64_json", **LONG}
    connection, response = post(server, "/v2/models/qwen_image_stream/generate_stream", body)
    told = events(response)
    request_id = json.loads(next(told)["EVENT"])["id"]
    while json.loads(next(told)["EVENT"])["event"] != "step":
        pass
    assert control(server, ACTION="cancel", ID=request_id) == {"found": True}
    *_, last = told
    connection.close()
    assert "cancelled by its id after" in last["error"]
    wait_until("the engine is idle", lambda: idle(server))


def test_cancel_by_id_of_a_plain_request(server: TritonServer) -> None:
    """An ensemble passes no cancel on, but it passes the request's id on."""
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def infer() -> None:
        with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
            try:
                outcome.put(
                    client.infer("qwen_image", inputs(**LONG), request_id="0123456789abcdef", client_timeout=TIMEOUT)
                )
            except InferenceServerException as error:
                outcome.put(error)

    thread = threading.Thread(target=infer)
    thread.start()
    wait_until("the engine is busy", lambda: not idle(server))
    assert control(server, ACTION="cancel", ID="0123456789abcdef") == {"found": True}
    error = outcome.get(timeout=TIMEOUT)
    thread.join(TIMEOUT)
    assert isinstance(error, InferenceServerException)
    assert error.status() == "StatusCode.CANCELLED"
    wait_until("the engine is idle", lambda: idle(server))


def test_an_id_that_is_not_there_yet_is_refused_when_it_comes(server: TritonServer) -> None:
    assert control(server, ACTION="cancel", ID="fedcba9876543210") == {"found": False}
    with (
        tritonclient.grpc.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="cancelled by its id"),
    ):
        client.infer("qwen_image", inputs(**LONG), request_id="fedcba9876543210", client_timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ACTION": "cancel", "ID": "1"}, "ID = '1': must have at least 16 characters"),
        ({"ACTION": "cancel"}, "ID = ''"),
        ({"ACTION": "stop"}, "ACTION = 'stop': must be one of cancel, status"),
    ],
)
def test_what_control_refuses(server: TritonServer, values: dict[str, str], message: str) -> None:
    assert message in control(server, **values)["error"]


def test_status(server: TritonServer) -> None:
    (engine,) = control(server, ACTION="status")["engines"]
    assert engine["name"].startswith("dit_")
    assert engine["healthy"] is True


def test_streams_share_steps(server: TritonServer) -> None:
    shared = metric(server, "ditpack_shared_steps_total")
    results: list[list[dict[str, Any]]] = []
    threads = [
        threading.Thread(target=lambda seed=seed: results.append(stream(server, NUM_INFERENCE_STEPS=40, SEED=seed)))
        for seed in range(3)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join(TIMEOUT)
    assert all("IMAGE" in told[-1] for told in results)
    assert metric(server, "ditpack_shared_steps_total") > shared
