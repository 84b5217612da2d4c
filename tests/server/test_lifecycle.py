"""A real tritonserver from start to end, with models of a few lines: it explains failures and leaves nothing behind."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ditpack.tritonserver.launch import ServeError, TritonServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]

READY = 60.0
CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
# Doubles X after sleeping X seconds; a negative X is not slept on.
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            time.sleep(max(0, int(x[0])))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", (2 * x).astype(np.int32))]))
        return responses
"""
FAILING = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("the weights are not here")

    def execute(self, requests):
        return []
"""


def add_model(repository: Path, name: str, code: str) -> Path:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    (repository / name / "1" / "model.py").write_text(code)
    return repository


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this test alone, so that what a server leaves there can be seen."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read TMPDIR again


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return add_model(tmp_path / "models", "double", MODEL)


def new_server(models: Path, log: Path | None = None) -> TritonServer:
    return TritonServer(models, http_port=0, grpc_port=0, metrics_port=0, log=log)


def double(url: str, value: int, timeout: float = 60.0) -> tuple[int, int]:
    """HTTP status and the doubled value."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    connection.request("POST", "/v2/models/double/generate", json.dumps({"X": value}))
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body.get("Y", 0)


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def processes_with(text: str) -> list[str]:
    """Command lines (zombies have none) that mention ``text``; all of a server's processes mention its prefix."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended meanwhile
            continue
        if text in command:
            found.append(command)
    return found


def regions_of(prefix: str) -> list[str]:
    return [region.name for region in Path("/dev/shm").glob(f"{prefix}*")]


def nothing_left(prefix: str) -> bool:
    """No process, no shared memory and, in the temporary directory of this test, no file of that server."""
    directories = [path for path in Path(tempfile.gettempdir()).glob("ditpack-*") if path.is_dir()]
    return not processes_with(prefix) and not regions_of(prefix) and not directories


def test_it_starts_answers_and_stops(models: Path) -> None:
    with new_server(models) as server:
        server.wait_ready(READY)
        assert double(server.http_url, -21) == (200, -42)
        for url in (server.http_url + "/v2/health/ready", server.metrics_url):
            connection = http.client.HTTPConnection(url.split("/")[2], timeout=10)
            connection.request("GET", "/" + url.split("/", 3)[3])
            assert connection.getresponse().status == 200
        assert len(processes_with(server.shm_prefix)) == 3  # keeper, server, stub
        assert len(regions_of(server.shm_prefix)) == 1
        log = server.log
        assert log is not None
        assert log.exists()
    assert nothing_left(server.shm_prefix)
    assert not log.exists()
    assert not server.running
    server.stop()  # once more does no harm


def test_the_same_object_starts_again(models: Path) -> None:
    server = new_server(models)
    for _ in range(2):
        with server:
            server.wait_ready(READY)
            assert double(server.http_url, 0) == (200, 0)
        assert nothing_left(server.shm_prefix)


def test_a_request_in_flight_is_answered_before_the_end(models: Path) -> None:
    answers: queue.Queue[tuple[int, int]] = queue.Queue()
    with new_server(models) as server:
        server.wait_ready(READY)
        client = threading.Thread(target=lambda: answers.put(double(server.http_url, 2)))
        client.start()
        time.sleep(0.7)
    client.join(30)
    assert answers.get(timeout=1) == (200, 4)


def test_a_killed_server_leaves_nothing(models: Path) -> None:
    with new_server(models) as server:
        server.wait_ready(READY)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServeError, match=r"tritonserver was killed by SIGKILL") as error:
            server.wait()
        assert nothing_left(server.shm_prefix)
    assert server.log is not None
    assert str(server.log) in str(error.value)
    server.log.unlink()  # kept, since the server failed


def test_a_killed_owner_leaves_nothing(models: Path) -> None:
    """The process that started the server gets no chance to clean up."""
    code = (
        "import sys, time; from pathlib import Path; from ditpack.tritonserver.launch import TritonServer\n"
        "server = TritonServer(Path(sys.argv[1]), None, '127.0.0.1', 0, 0, 0, Path(sys.argv[2]))\n"
        "server.start(); server.wait_ready(60); print(server.shm_prefix, flush=True); time.sleep(600)"
    )
    arguments = [str(models), str(models.parent / "server.log")]
    owner = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    prefix = owner.stdout.readline().strip()
    assert prefix
    assert regions_of(prefix)
    owner.kill()
    owner.wait()
    assert eventually(lambda: nothing_left(prefix))


def test_a_killed_keeper_takes_the_server_with_it(models: Path) -> None:
    with new_server(models) as server:
        server.wait_ready(READY)
        assert server._keeper is not None
        server._keeper.kill()
        assert eventually(lambda: not processes_with(server.shm_prefix))
    assert nothing_left(server.shm_prefix)


def test_why_a_model_does_not_load(models: Path, tmp_path: Path) -> None:
    add_model(models, "failing", FAILING)
    log = tmp_path / "server.log"
    log.write_text("failed to load 'yesterday' version 1: Internal: of an earlier run\n")
    server = new_server(models, log)
    server.start()
    with pytest.raises(ServeError) as error:
        server.wait_ready(READY)
    first, second = str(error.value).splitlines()
    assert first == "model 'failing' failed to load: ValueError: the weights are not here"
    assert second == f"At {models}/failing/1/model.py:4 (initialize). Full log: {log}"
    assert nothing_left(server.shm_prefix)


def test_a_model_that_takes_too_long(models: Path, tmp_path: Path) -> None:
    add_model(models, "slow", "import time\ntime.sleep(600)\n")
    server = new_server(models, tmp_path / "server.log")
    server.start()
    with pytest.raises(ServeError, match=r"not ready after 2 s; not ready: double, slow"):
        server.wait_ready(2)
    assert nothing_left(server.shm_prefix)


class Serve:
    """``ditpack serve`` in a process of its own."""

    def __init__(self, models: Path) -> None:
        code = "import sys; from ditpack.cli.app import main; sys.argv[0] = 'ditpack'; main()"
        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        self.log = models.parent / "server.log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--model-repository", models, "--log", self.log, *ports],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> str:
        """Its HTTP address."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"HTTP (http://\S+)", line)
            if found:
                return found[1]
        raise AssertionError(f"ended before it was ready: {self.process.stderr and self.process.stderr.read()}")

    def prefix(self) -> str:
        found = re.search(r"ditpack_[0-9a-f]{12}_", self.log.read_text())
        assert found
        return found[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_cleanly_on_a_signal(models: Path, number: signal.Signals) -> None:
    serve = Serve(models)
    url = serve.wait_ready()
    answers: queue.Queue[tuple[int, int]] = queue.Queue()
    client = threading.Thread(target=lambda: answers.put(double(url, 2)))
    client.start()
    time.sleep(0.7)
    serve.process.send_signal(number)
    output, errors = serve.process.communicate(timeout=60)
    assert (serve.process.returncode, errors) == (0, "")
    assert output.endswith("Stopped.\n")
    client.join(10)
    assert answers.get(timeout=1) == (200, 4)
    assert nothing_left(serve.prefix())


def test_serve_ends_at_once_on_the_second_signal(models: Path) -> None:
    serve = Serve(models)
    url = serve.wait_ready()
    errors: queue.Queue[OSError] = queue.Queue()

    def ask() -> None:
        try:
            double(url, 600)
        except OSError as error:
            errors.put(error)

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(0.7)
    serve.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert serve.process.poll() is None  # it waits for the request
    serve.process.send_signal(signal.SIGINT)
    serve.process.communicate(timeout=20)
    assert serve.process.returncode == 0
    assert errors.get(timeout=10)
    assert nothing_left(serve.prefix())


def test_serve_says_why_it_fails_in_two_lines(models: Path) -> None:
    serve = Serve(add_model(models, "failing", FAILING))
    _, errors = serve.process.communicate(timeout=60)
    assert serve.process.returncode == 1
    assert errors.splitlines() == [
        "error: model 'failing' failed to load: ValueError: the weights are not here",
        f"At {models}/failing/1/model.py:4 (initialize). Full log: {serve.log}",
    ]
    assert nothing_left(serve.prefix())
