"""The ensemble with its dit over two processes: answers, shared steps, and a worker that is killed."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
from server_tools import (
    Caller,
    assert_same_picture,
    code,
    edited_repository,
    family,
    info,
    load,
    parameter,
    serving,
    wait_until,
)
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

KIND = (r"kind: KIND_AUTO", "kind: KIND_MODEL")
MIX = [
    {"PROMPT": "a red apple", "WIDTH": 64, "HEIGHT": 64, "SEED": 1, "NUM_INFERENCE_STEPS": 150},
    {"PROMPT": "two hearts", "WIDTH": 96, "HEIGHT": 64, "SEED": 2, "NUM_INFERENCE_STEPS": 200, "TRUE_CFG_SCALE": 1.0},
    {"PROMPT": "a sun above a cloud", "WIDTH": 64, "HEIGHT": 160, "SEED": 3, "NUM_INFERENCE_STEPS": 150},
]


@pytest.fixture(scope="module")
def parallel_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """When it has stopped, no process and no shared memory is left, and nobody has made noise."""
    directory = tmp_path_factory.mktemp("parallel")
    edits = [KIND, parameter("devices", "cpu,cpu"), parameter("worker_timeout_s", "20")]
    repository = edited_repository(directory / "models", {"dit": edits})
    with serving(tiny_checkpoint, directory / "tritonserver.log", repository) as server:
        yield server
    log = (directory / "tritonserver.log").read_text("utf-8", "replace")
    assert not re.search(r"Traceback|terminate called|Warning|\[rank\d|leaked|gloo|nccl", log, re.IGNORECASE), log


def workers(server: TritonServer) -> list[int]:
    assert server.pid is not None
    found = []
    for pid in family(server.pid):
        try:
            if b"ditpack.parallel.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def together(server: TritonServer, requests: list[dict[str, Any]]) -> list[dict[str, npt.NDArray[Any]] | Exception]:
    """All requests at once, each with a caller of its own."""

    def call(values: dict[str, Any]) -> dict[str, npt.NDArray[Any]] | Exception:
        caller = Caller(server, "grpc")
        try:
            return caller.infer(values | {"OUTPUT_FORMAT": "raw"}, outputs=["PIXELS", "INFO"])
        except InferenceServerException as error:
            return error
        finally:
            caller.close()

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(call, requests))


def test_mixed_sizes_share_steps(parallel_server: TritonServer, grpc_caller: Caller) -> None:
    """And their pictures are those of the server that runs on one device."""
    assert len(workers(parallel_server)) == 2
    answers = together(parallel_server, MIX)
    assert max(info(answer)["pack"]["shared_steps"] for answer in answers if isinstance(answer, dict)) > 0
    for answer, values in zip(answers, MIX, strict=True):
        assert isinstance(answer, dict), answer
        alone = grpc_caller.infer(values | {"OUTPUT_FORMAT": "raw"}, outputs=["PIXELS"])
        assert_same_picture(answer["PIXELS"], alone["PIXELS"])


def test_a_killed_worker(parallel_server: TritonServer) -> None:
    """What is in flight gets UNAVAILABLE, and once the workers are back, the same requests get their pictures."""
    before = workers(parallel_server)
    outcome: list[Any] = []
    slow = [values | {"NUM_INFERENCE_STEPS": 200} for values in MIX]
    thread = threading.Thread(target=lambda: outcome.extend(together(parallel_server, slow)))
    thread.start()
    wait_until("the requests are in flight", lambda: load(parallel_server)[0] == len(MIX))
    os.kill(before[0], signal.SIGKILL)
    thread.join(30)
    assert [code(error) for error in outcome] == ["UNAVAILABLE"] * len(MIX), outcome
    assert "workers were lost" in str(outcome[0])
    wait_until("new workers", lambda: len(set(workers(parallel_server)) - set(before)) == 2)

    def served() -> bool:
        return all(isinstance(answer, dict) for answer in together(parallel_server, MIX))

    wait_until("pictures again", served)
