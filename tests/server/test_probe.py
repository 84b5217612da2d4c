"""``ditpack probe``, as a container runs it, against a server that is well, busy, drained and broken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_tools import TIMEOUT, Caller, family, load, serving, wait_until

from ditpack.tritonserver.launch import TritonServer

pytestmark = pytest.mark.server

PROBE = [sys.executable, "-c", "from ditpack.cli.app import main; main()", "probe"]
LONG = {"PROMPT": "a red kite", "WIDTH": 512, "HEIGHT": 512, "NUM_INFERENCE_STEPS": 60, "SEED": 7}


def probe(server: TritonServer, question: str, seconds: float = 20) -> tuple[int, str]:
    ports = ["--port", str(server.http_port), "--metrics-port", str(server.metrics_port)]
    done = subprocess.run(
        [*PROBE, question, "--seconds", str(seconds), "--interval", "0.1", *ports],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    return done.returncode, done.stderr


@pytest.fixture
def busy(server: TritonServer) -> Iterator[threading.Thread]:
    """A thread that waits for a large picture, under way."""
    caller = Caller(server, "grpc")
    thread = threading.Thread(target=lambda: caller.infer(LONG))
    thread.start()
    wait_until("the picture is under way", lambda: load(server)[0] > 0)
    yield thread
    thread.join(TIMEOUT)
    caller.close()


def test_well(server: TritonServer) -> None:
    assert probe(server, "ready") == (0, "")
    assert probe(server, "alive") == (0, "")
    assert probe(server, "drained") == (0, "")


def test_busy(server: TritonServer, busy: threading.Thread) -> None:
    assert probe(server, "alive", seconds=5) == (0, "")
    code, message = probe(server, "drained", seconds=0.3)
    assert (code, message) == (1, "still busy after 0.3 s\n")
    assert probe(server, "drained", seconds=TIMEOUT) == (0, "")
    busy.join(5)
    assert not busy.is_alive(), "drained, and a picture was still in flight"


def test_nobody_there(server: TritonServer) -> None:
    done = subprocess.run([*PROBE, "ready", "--port", "1"], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1
    assert "not ready" in done.stderr


def test_a_dead_model_is_noticed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        assert server.pid is not None
        stubs = [pid for pid in family(server.pid) if "/dit/" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert stubs
        for pid in stubs:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        assert probe(server, "ready") == (0, ""), "if Triton itself says so, ditpack probe need not ask for a picture"
        code, message = probe(server, "alive", seconds=5)
        assert code == 1
        assert "no picture and no step" in message
        server.kill()  # it would wait for the dead model as long as it may
