"""Models that are unloaded and loaded again under load: everybody is answered in time, and what comes later works."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
from server_tools import edited_repository, load, serving, tensors, wait_until
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

BOUND = 60.0  # seconds; dit's finalize gives those in flight 20
VALUES = {"PROMPT": "a red kite", "WIDTH": 64, "HEIGHT": 64, "NUM_INFERENCE_STEPS": 30}
B64 = {"RESPONSE_FORMAT": "b64_json"}


class Reloadable:
    """A server whose repository can be edited, and the key to the API that ``ditpack`` locks."""

    def __init__(self, server: TritonServer, repository: Path) -> None:
        self.server, self.repository = server, repository
        command = Path(f"/proc/{server.pid}/cmdline").read_text()
        key = re.search(r"--http-restricted-api=[^\0]*:(\w+)=(\w+)", command)
        assert key
        self._key = {key[1]: key[2]}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        host, _, port = self.server.http_url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=BOUND)
        try:
            connection.request("POST", path, json.dumps(body), self._key)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def control(self, verb: str) -> None:
        assert self.post(f"/v2/repository/models/dit/{verb}", {}) == (200, "")

    def engines(self) -> list[dict[str, Any]]:
        _, answer = self.post("/v2/models/control/generate", {"ACTION": "status"})
        engines: list[dict[str, Any]] = json.loads(json.loads(answer)["ANSWER"])["engines"]
        return engines


@pytest.fixture(scope="module")
def reloadable(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloadable]:
    directory = tmp_path_factory.mktemp("reload")
    repository = edited_repository(directory / "model_repository", {})
    with serving(tiny_checkpoint, directory / "log", repository) as server:
        yield Reloadable(server, repository)


class Load:
    """Two callers of each way in, again and again until told to stop; what they were told, and how long it took."""

    def __init__(self, reloadable: Reloadable) -> None:
        self._reloadable = reloadable
        self._stop = threading.Event()
        self.outcomes: list[tuple[str, float]] = []
        self._threads = [
            threading.Thread(target=self._again_and_again, args=(way,))
            for way in (self._http, self._stream, self._grpc)
            for _ in range(2)
        ]
        for thread in self._threads:
            thread.start()
        wait_until("a request of each is served", lambda: len(self.outcomes) > len(self._threads))

    def end(self) -> set[str]:
        """Stop, and the different outcomes; nobody may have waited for longer than BOUND."""
        self._stop.set()
        for thread in self._threads:
            thread.join(BOUND)
            assert not thread.is_alive()
        assert max(seconds for _, seconds in self.outcomes) < BOUND
        return {outcome for outcome, _ in self.outcomes}

    def _again_and_again(self, way: Any) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            outcome = way()
            self.outcomes.append((outcome, time.monotonic() - began))
            if outcome != "ok":
                time.sleep(0.1)

    def _http(self) -> str:
        status, text = self._reloadable.post("/v2/models/qwen_image/generate", VALUES | B64)
        return "ok" if status == 200 and "SEED_USED" in text else text

    def _stream(self) -> str:
        status, text = self._reloadable.post("/v2/models/qwen_image_stream/generate_stream", VALUES | B64)
        last = text.strip().splitlines()[-1]
        return "ok" if status == 200 and "SEED_USED" in last else last

    def _grpc(self) -> str:
        with tritonclient.grpc.InferenceServerClient(self._reloadable.server.grpc_url) as client:
            try:
                client.infer("qwen_image", tensors(tritonclient.grpc, VALUES), client_timeout=BOUND)
            except InferenceServerException as error:
                return str(error.message())
        return "ok"


def test_a_changed_config_takes_over_and_nobody_notices(reloadable: Reloadable) -> None:
    """Triton starts the new dit, then lets the old one finish: no request may fail."""
    running = Load(reloadable)
    config = reloadable.repository / "dit" / "config.pbtxt"
    text = config.read_text()
    assert text.count('"256"') == 1
    config.write_text(text.replace('"256"', '"255"'))
    time.sleep(1.1)  # Triton tells files apart by their time, in seconds
    reloadable.control("load")
    made = len(running.outcomes)
    wait_until("the new one serves all", lambda: len(running.outcomes) > made + 12)
    assert running.end() == {"ok"}
    wait_until("one engine, idle", lambda: load(reloadable.server) == (0, 0))
    (engine,) = reloadable.engines()
    assert engine == {"name": "dit_0_0", "healthy": True, "refusal": None, "active": 0, "waiting": 0}


def test_unloaded_and_loaded_again(reloadable: Reloadable) -> None:
    running = Load(reloadable)
    reloadable.control("unload")
    wait_until("the engine has ended", lambda: reloadable.engines() == [])
    reloadable.control("load")
    made = len(running.outcomes)
    wait_until("it serves again", lambda: [outcome for outcome, _ in running.outcomes[made:]].count("ok") > 12)
    outcomes = running.end() - {"ok"}
    assert outcomes
    allowed = r"unknown model: 'qwen_image' has no available versions|is not ready|shutting down|not found"
    assert not [outcome for outcome in outcomes if not re.search(allowed, outcome)]
    (engine,) = reloadable.engines()
    assert engine["healthy"]
