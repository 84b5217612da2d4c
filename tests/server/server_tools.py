"""What the server tests share: starting servers, calling their models, and looking at what they leave behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from ditpack.tritonserver.launch import ServeError, TritonServer
from ditpack.tritonserver.launch.repository import find_repository

TIMEOUT = 60.0  # seconds; the longest that any one call may take
READY_TIMEOUT = 120.0
NARROW_QUEUE = 4  # requests that wait in the server of the fixture narrow
# CI sets it by way of `make test`: there a server that cannot start is a failure, not a reason to skip.
REQUIRE_SERVER = "DITPACK_TESTS_REQUIRE_SERVER"
SHARED_MEMORY = Path("/dev/shm")
PROBE = [sys.executable, "-c", "from ditpack.cli.app import main; main()", "probe"]

DTYPES: dict[str, Any] = {
    "PROMPT": np.object_,
    "NEGATIVE_PROMPT": np.object_,
    "WIDTH": np.int32,
    "HEIGHT": np.int32,
    "NUM_INFERENCE_STEPS": np.int32,
    "TRUE_CFG_SCALE": np.float32,
    "SEED": np.int64,
    "OUTPUT_FORMAT": np.object_,
    "RESPONSE_FORMAT": np.object_,
    "DEADLINE_MS": np.int32,
    "PRIORITY": np.int32,
}
_CODES = {
    "400": "INVALID_ARG",  # over HTTP also CANCELLED
    "404": "NOT_FOUND",
    "500": "INTERNAL",
    "503": "UNAVAILABLE",
    "StatusCode.INVALID_ARGUMENT": "INVALID_ARG",
    "StatusCode.NOT_FOUND": "NOT_FOUND",
    "StatusCode.INTERNAL": "INTERNAL",
    "StatusCode.UNAVAILABLE": "UNAVAILABLE",
    "StatusCode.CANCELLED": "CANCELLED",
}

Values = Mapping[str, Any]
Pixels = npt.NDArray[np.uint8]


# Calls.


def tensors(protocol: ModuleType, values: Values) -> list[Any]:
    """``InferInput``s: a scalar becomes [1] in the wire's own type, an array is sent as it is."""
    made = []
    for name, value in values.items():
        array = value if isinstance(value, np.ndarray) else np.array([value], DTYPES[name])
        tensor = protocol.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def wanted(protocol: ModuleType, names: Sequence[str] | None) -> list[Any] | None:
    return None if names is None else [protocol.InferRequestedOutput(name) for name in names]


class Caller:
    """One protocol of one server, for one thread. ``close`` it."""

    def __init__(self, server: TritonServer, protocol: str) -> None:
        self.protocol = protocol
        self._module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
        if protocol == "http":
            self._client = tritonclient.http.InferenceServerClient(
                server.http_url.removeprefix("http://"), connection_timeout=TIMEOUT, network_timeout=TIMEOUT
            )
        else:
            self._client = tritonclient.grpc.InferenceServerClient(server.grpc_url)

    def infer(
        self, values: Values, *, model: str = "qwen_image", outputs: Sequence[str] | None = None, **options: Any
    ) -> dict[str, npt.NDArray[Any]]:
        """The outputs by name.

        Raises:
            InferenceServerException: what the server answered; see ``code``.
        """
        if self.protocol == "grpc":
            options["client_timeout"] = TIMEOUT
        result = self._client.infer(
            model, tensors(self._module, values), outputs=wanted(self._module, outputs), **options
        )
        response = result.get_response()
        if self.protocol == "http":
            names = [output["name"] for output in response["outputs"]]
        else:
            names = [output.name for output in response.outputs]
        return {name: result.as_numpy(name) for name in names}

    def close(self) -> None:
        self._client.close()


def code(error: InferenceServerException) -> str:
    """The Triton code of an error, whichever protocol brought it."""
    status = str(error.status())
    return _CODES.get(status, status)


def info(outputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    return dict(json.loads(outputs["INFO"].item()))


def assert_same_picture(ours: Pixels, theirs: Pixels, levels: int = 1) -> None:
    """Within ``levels`` of 255: a pack of another make-up adds up in another order."""
    assert ours.shape == theirs.shape
    difference = np.abs(ours.astype(int) - theirs.astype(int))
    assert difference.max() <= levels, f"{(difference > levels).mean():.2%} differ, by up to {difference.max()} levels"


def wait_until(what: str, holds: Callable[[], bool], timeout: float = TIMEOUT) -> None:
    """Poll until ``holds`` does."""
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.02)


# Metrics and log.

_SAMPLE = re.compile(r"^(\w+)(\{.*\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def metric(server: TritonServer, name: str, **labels: str) -> float:
    """The sum of the samples of ``name`` that carry ``labels``."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.metrics_url, timeout=10) as response:
        text = response.read().decode()
    return sum(
        float(value)
        for found, written, value in _SAMPLE.findall(text)
        if found == name and labels.items() <= dict(_LABEL.findall(written)).items()
    )


def outcomes(server: TritonServer) -> dict[str, int]:
    names = ("ok", "invalid", "cancelled", "deadline", "unavailable", "failed")
    return {name: int(metric(server, "ditpack_requests_total", outcome=name)) for name in names}


class Ports(Protocol):
    http_port: int
    metrics_port: int


def probe(server: Ports, question: str, seconds: float = 20) -> tuple[int, str]:
    """Exit code and errors of ``ditpack probe``, as a container runs it."""
    arguments = [question, "--seconds", str(seconds), "--interval", "0.1"]
    arguments += ["--port", str(server.http_port), "--metrics-port", str(server.metrics_port)]
    done = subprocess.run([*PROBE, *arguments], capture_output=True, text=True, timeout=TIMEOUT)
    return done.returncode, done.stderr


def load(server: TritonServer) -> tuple[int, int]:
    """(active, waiting) requests in the engine."""
    return int(metric(server, "ditpack_active_requests")), int(metric(server, "ditpack_waiting_requests"))


def logged_requests(server: TritonServer) -> list[dict[str, Any]]:
    """The structured line of every request that ended so far."""
    assert server.log is not None
    lines = []
    for line in server.log.read_text("utf-8", "replace").splitlines():
        match = re.search(r'\] ("\{.*\}")$', line)  # Triton writes the message as one JSON string
        if match is not None:
            record = json.loads(json.loads(match[1]))
            if record["event"] == "request":
                lines.append(record)
    return lines


# Servers.


@contextmanager
def serving(
    checkpoint: Path, log: Path, model_repository: Path | None = None, options: tuple[str, ...] = ()
) -> Iterator[TritonServer]:
    """A ready server on free ports. Afterwards nothing of it may be left.

    Skips, with the reason, where no tritonserver can run at all; one that fails once it runs is always a failure.
    """
    server = TritonServer(
        model_repository,
        checkpoint,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log=log,
        exit_timeout=30,
        options=options,
    )
    try:
        server.start()
    except ServeError as error:
        if os.environ.get(REQUIRE_SERVER):
            raise
        pytest.skip(f"no tritonserver can run here: {error}")
    processes: dict[int, str] = {}
    try:
        server.wait_ready(READY_TIMEOUT)
        assert server.pid is not None
        processes = family(server.pid)
        yield server
    finally:
        server.stop(60)
    left = [pid for pid, started in processes.items() if start_time(pid) == started]
    assert not left, f"processes {left} outlived their server"
    assert not regions(server), "shared memory outlived its server"


def edited_repository(directory: Path, edits: Mapping[str, Sequence[tuple[str, str]]]) -> Path:
    """A copy of ditpack's model repository in which each model's (pattern, replacement)s are made, once each."""
    copy = Path(shutil.copytree(find_repository(None), directory, ignore=shutil.ignore_patterns("__pycache__")))
    for model, replacements in edits.items():
        config = copy / model / "config.pbtxt"
        text = config.read_text()
        for pattern, replacement in replacements:
            text, count = re.subn(pattern, replacement, text)
            assert count == 1, f"{pattern!r} is {count} times in {model}/config.pbtxt"
        config.write_text(text)
    return copy


def parameter(name: str, value: str) -> tuple[str, str]:
    """An edit that sets a ``config.pbtxt`` parameter."""
    return rf'(key: "{name}" value {{ string_value: )"[^"]*"', rf'\g<1>"{value}"'


# What a server holds.


def start_time(pid: int) -> str | None:
    """When the process started, which tells a reused process id from the old one; None when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def family(pid: int) -> dict[int, str]:
    """The process and all its descendants, each with its start time."""
    found: dict[int, str] = {}
    queue = [pid]
    while queue:
        current = queue.pop()
        started = start_time(current)
        if started is None:
            continue
        found[current] = started
        for task in Path(f"/proc/{current}/task").glob("*/children"):
            queue += map(int, task.read_text().split())
    return found


def threads(server: TritonServer) -> int:
    """Threads of the server and its models together."""
    assert server.pid is not None
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in family(server.pid))


def regions(server: TritonServer) -> dict[str, int]:
    """The server's shared memory regions and their sizes in bytes."""
    return {path.name: path.stat().st_size for path in SHARED_MEMORY.glob(f"{server.shm_prefix}*")}
