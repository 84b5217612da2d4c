"""``ditpack serve`` when parts of it die, under load: everybody hears of it in time, and nothing is left."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
from server_tools import edited_repository, family, parameter, probe, start_time, tensors, wait_until
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

BOUND = 60.0  # seconds; the longest that anybody may wait for the bad news (the watchdog: 1 s, its grace: 5 s)
LONG = {"PROMPT": "a red kite", "WIDTH": 128, "HEIGHT": 128, "NUM_INFERENCE_STEPS": 200}
CALLERS = 4  # of each protocol

# Behind dit's model.py: its engine's thread dies at the step after the one that carries a picture of 13 steps.
DIES = """

class Dying(TritonPythonModel):
    def initialize(self, args):
        super().initialize(args)
        sampler = self._door._engine._sampler
        step = sampler.step

        def dying(pack):
            if any(member.request.num_inference_steps == 13 for member in pack.members):
                raise SystemExit("a bug")
            return step(pack)

        sampler.step = dying


TritonPythonModel = Dying
"""


class Serve:
    """``ditpack serve`` in a process of its own, and what it said."""

    def __init__(self, checkpoint: Path, directory: Path, *options: str | Path) -> None:
        self.log = directory / "server.log"
        code = "import sys; from ditpack.cli.app import main; sys.argv[0] = 'ditpack'; main()"
        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--exit-timeout", "30")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--checkpoint", checkpoint, "--log", self.log, *ports, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if found := re.search(r"HTTP http://127.0.0.1:(\d+)   gRPC (\S+)   metrics http://127.0.0.1:(\d+)", line):
                self.http_port, self.grpc, self.metrics_port = int(found[1]), found[2], int(found[3])
                break
        else:
            raise AssertionError(f"not ready: {said}{self.process.stderr and self.process.stderr.read()}")
        pid = re.search(r"Starting tritonserver \(process (\d+)", said)
        assert pid
        self.family = family(int(pid[1]))
        prefix = re.search(r"ditpack_[0-9a-f]{12}_", self.log.read_text())
        assert prefix
        self.prefix = prefix[0]

    def stub(self, model: str) -> int:
        (pid,) = (pid for pid in self.family if f"/{model}/1/" in Path(f"/proc/{pid}/cmdline").read_text())
        return pid

    def metric(self, name: str, model: str = "") -> float:
        """All series of ``name``, or that of one model."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=10)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*{model}.*}})? (\S+)$", text, re.MULTILINE))

    def ended(self, timeout: float = BOUND) -> tuple[int, str, str]:
        """Exit code, output and errors, once it has ended; nothing of it may be left then."""
        output, errors = self.process.communicate(timeout=timeout)
        left = [pid for pid, started in self.family.items() if start_time(pid) == started]
        assert not left, f"processes {left} outlived their server"
        assert not list(Path("/dev/shm").glob(f"{self.prefix}*"))
        return self.process.returncode, output, errors


@pytest.fixture
def serve(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*options: str | Path) -> Serve:
        started.append(Serve(tiny_checkpoint, tmp_path, *options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGTERM)
            time.sleep(1)
            each.process.send_signal(signal.SIGTERM)  # at once, please
            each.process.communicate(timeout=60)


def over_http(serve: Serve, values: dict[str, Any], stream: bool = False) -> str:
    """How it ended: "ok" or what was wrong."""
    model = "qwen_image_stream/generate_stream" if stream else "qwen_image/generate"
    connection = http.client.HTTPConnection("127.0.0.1", serve.http_port, timeout=2 * BOUND)
    try:
        connection.request("POST", f"/v2/models/{model}", json.dumps(values | {"RESPONSE_FORMAT": "b64_json"}))
        response = connection.getresponse()
        text = response.read().decode()
        return "ok" if response.status == 200 and '"SEED_USED"' in text else text or "nothing"
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()


def over_grpc(serve: Serve, values: dict[str, Any]) -> str:
    with tritonclient.grpc.InferenceServerClient(serve.grpc) as client:
        try:
            client.infer("qwen_image", tensors(tritonclient.grpc, values), client_timeout=2 * BOUND)
        except InferenceServerException as error:
            return str(error)
    return "ok"


class Load:
    """Callers of each protocol, each with one request; ``seconds`` to each one's end."""

    def __init__(self, serve: Serve, values: dict[str, Any]) -> None:
        self._pool = ThreadPoolExecutor(3 * CALLERS)
        self.calls: list[Future[str]] = []
        for _ in range(CALLERS):
            self.calls.append(self._pool.submit(over_http, serve, values))
            self.calls.append(self._pool.submit(over_http, serve, values, True))
            self.calls.append(self._pool.submit(over_grpc, serve, values))
        wait_until("they are under way", lambda: serve.metric("ditpack_active_requests") > 0)

    def ended(self) -> list[str]:
        outcomes = [call.result(timeout=BOUND) for call in self.calls]
        self._pool.shutdown()
        return outcomes


@pytest.mark.parametrize("model", ["dit", "vae_decoder"])
def test_a_killed_model_ends_the_server_and_everybody_hears_of_it(serve: Callable[..., Serve], model: str) -> None:
    served = serve()
    load = Load(served, LONG)
    os.kill(served.stub(model), signal.SIGKILL)
    late = threading.Thread(target=over_http, args=(served, LONG))
    late.start()
    code, _, errors = served.ended()
    assert code == 1
    first, second = errors.splitlines()
    assert re.fullmatch(
        rf"error: The server could not go on: the process of model '{model}' died \(process \d+\).", first
    )
    assert str(served.log) in second
    outcomes = load.ended()
    assert len(outcomes) == 3 * CALLERS
    assert "ok" not in outcomes, "200 steps within the few seconds that this took?"
    late.join(BOUND)
    assert not late.is_alive()


def test_an_engine_that_raises_answers_everybody_and_ends_the_server(
    serve: Callable[..., Serve], tmp_path: Path
) -> None:
    repository = edited_repository(tmp_path / "models", {})
    with (repository / "dit" / "1" / "model.py").open("a") as file:
        file.write(DIES)
    served = serve("--model-repository", repository)
    load = Load(served, LONG)
    assert "the engine stopped (SystemExit)" in over_http(served, LONG | {"NUM_INFERENCE_STEPS": 13})
    for outcome in load.ended():
        assert "the engine stopped (SystemExit); the server has to be restarted" in outcome
    code, _, errors = served.ended()
    assert code == 1
    assert "error: The server could not go on: dit_0_0: the engine stopped (SystemExit)" in errors


def test_without_the_watchdog_it_stays_and_the_probe_says_what_is_wrong(serve: Callable[..., Serve]) -> None:
    served = serve("--no-watchdog")
    os.kill(served.stub("dit"), signal.SIGKILL)
    time.sleep(0.5)
    assert probe(served, "ready") == (0, ""), "if Triton itself says so, ditpack probe need not ask for a picture"
    code, message = probe(served, "alive", seconds=3)  # longer than a watchdog would look away
    assert code == 1
    assert "no picture and no step" in message
    assert served.process.poll() is None
    connection = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=30)
    connection.request("POST", "/v2/models/control/generate", json.dumps({"ACTION": "status"}))
    (engine,) = json.loads(json.load(connection.getresponse())["ANSWER"])["engines"]
    connection.close()
    assert (engine["healthy"], engine["refusal"]) == (False, "its process does not answer")


def test_sigterm_finishes_what_was_accepted(serve: Callable[..., Serve], tmp_path: Path) -> None:
    """Eight: one takes steps, and seven wait for their turn."""
    edits = {"dit": [parameter("token_budget", "64")]}
    served = serve("--model-repository", edited_repository(tmp_path / "models", edits))
    values = LONG | {"WIDTH": 64, "HEIGHT": 64, "NUM_INFERENCE_STEPS": 120}
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(over_http, served, values, index % 2 == 0) for index in range(4)]
        calls += [pool.submit(over_grpc, served, values) for _ in range(4)]
        wait_until(
            "all are in the engine",
            lambda: served.metric("ditpack_active_requests") == 1 and served.metric("ditpack_waiting_requests") == 7,
        )
        served.process.send_signal(signal.SIGTERM)
        outcomes = [call.result(timeout=BOUND) for call in calls]
    assert outcomes == ["ok"] * 8
    code, output, errors = served.ended()
    assert (code, errors) == (0, "")
    assert output.endswith("Stopped.\n")
