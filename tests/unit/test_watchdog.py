"""The watchdog's eyes: processes that end or turn into zombies, engines that refuse or fall silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ditpack.engine import channel
from ditpack.tritonserver.launch import watchdog
from ditpack.tritonserver.launch.watchdog import Watchdog


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process that looks like a model's."""
    command = ["/somewhere/triton_python_backend_stub", "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, executable=sys.executable)
    yield process
    process.kill()
    process.wait()


def as_model(monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]) -> Watchdog:
    made = Watchdog(os.getpid(), Path("/nonexistent"))
    assert process.pid in made._processes
    made._processes = {process.pid: (made._processes[process.pid][0], "dit")}
    return made


def test_a_model_that_lives_is_no_trouble(stub: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_model(monkeypatch, stub).trouble() is None


@pytest.mark.parametrize("reaped", [False, True])
def test_a_model_that_died(stub: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, reaped: bool) -> None:
    dog = as_model(monkeypatch, stub)
    stub.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, stub.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie still
    if reaped:
        stub.wait()
    assert dog.trouble() == f"the process of model 'dit' died (process {stub.pid})"


def test_what_engines_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dit_0_0.sock").touch()
    answer: dict[str, Any] | None = {"refusal": None}
    monkeypatch.setattr(channel, "ask", lambda *_: answer)
    dog = Watchdog(os.getpid(), tmp_path)
    dog._processes = {}
    assert dog.trouble() is None
    answer = None
    assert dog.trouble() is None, "it may be busy"
    monkeypatch.setattr(watchdog, "_SILENCE_S", 0.0)
    assert dog.trouble() == "dit_0_0 has not answered for 0 s"
    answer = {"refusal": "the engine stopped (SystemExit); the server has to be restarted"}
    assert dog.trouble() == "dit_0_0: the engine stopped (SystemExit); the server has to be restarted"
