"""``ditpack probe`` against servers that only pretend; tests/server has a real one."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ditpack.cli import probe


class Pretender(http.server.BaseHTTPRequestHandler):
    """Answers with what the test put into ``pages``: (status, text), or a function that makes it."""

    pages: dict[str, Any]

    def do_GET(self) -> None:
        page = self.pages.get(self.path, (404, ""))
        status, text = page() if callable(page) else page
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pages() -> dict[str, Any]:
    return {"/v2/health/ready": (200, ""), "/metrics": (200, "ditpack_steps_total 5")}


@pytest.fixture
def port(pages: dict[str, Any]) -> Iterator[int]:
    handler = type("Handler", (Pretender,), {"pages": pages})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def ask(question: str, port: int, seconds: float = 0.5) -> str | None:
    try:
        probe.probe(probe.Question(question), "127.0.0.1", port, port, seconds=seconds, interval=0.02)
    except SystemExit as end:
        return str(end.code)
    return None


def test_ready(pages: dict[str, Any], port: int) -> None:
    assert ask("ready", port) is None
    pages["/v2/health/ready"] = (400, "")
    assert ask("ready", port) == "not ready: 400"


@pytest.mark.parametrize("page", [(200, "a picture"), (400, "WIDTH = 64: must be a multiple of 128")])
def test_alive_when_somebody_answers(pages: dict[str, Any], port: int, page: tuple[int, str]) -> None:
    pages["/v2/models/qwen_image/generate"] = page
    assert ask("alive", port) is None


def test_alive_while_steps_go_on(pages: dict[str, Any], port: int) -> None:
    steps = iter(range(1000))
    pages["/v2/models/qwen_image/generate"] = (503, "Exceeds maximum queue size")
    pages["/metrics"] = lambda: (200, f'ditpack_steps_total{{a="b"}} {next(steps)}')
    assert ask("alive", port) is None


def test_not_alive_when_they_stand_still(pages: dict[str, Any], port: int) -> None:
    pages["/v2/models/qwen_image/generate"] = (503, "the engine stopped")
    assert ask("alive", port) == "no picture and no step: 503 the engine stopped"


def test_drained_after_three_idle_looks(pages: dict[str, Any], port: int) -> None:
    looks = iter([1, 0, 0, 2, 0, 0, 0])
    pages["/metrics"] = lambda: (200, f'ditpack_active_requests{{instance="dit_0_0"}} {next(looks)}')
    assert ask("drained", port, seconds=5) is None
    assert next(looks, None) is None


def test_not_drained_in_time(pages: dict[str, Any], port: int) -> None:
    pages["/metrics"] = (200, 'nv_inference_pending_request_count{model="dit"} 3')
    assert ask("drained", port, seconds=0.2) == "still busy after 0.2 s"


def test_nobody_there() -> None:
    assert "not ready: 0" in str(ask("ready", 1))
    assert "no picture and no step: 0" in str(ask("alive", 1, seconds=0.1))
    assert ask("drained", 1) is None, "nobody is left to wait for"


def test_it_needs_the_standard_library_alone() -> None:
    code = f"import sys; sys.path.insert(0, {str(probe.__file__).removesuffix('probe.py')!r}); import probe"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command() -> None:
    code = "from ditpack.cli.app import main; main()"
    arguments = ["probe", "ready", "--port", "1", "--seconds", "1"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("not ready: 0")
