"""``ditpack probe``, as a container runs it, against a server that is well, busy and drained (test_faults: broken)."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator

import pytest
from server_tools import PROBE, TIMEOUT, Caller, load, probe, wait_until

from ditpack.tritonserver.launch import TritonServer

pytestmark = pytest.mark.server

LONG = {"PROMPT": "a red kite", "WIDTH": 512, "HEIGHT": 512, "NUM_INFERENCE_STEPS": 60, "SEED": 7}


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
