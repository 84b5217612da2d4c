"""The linter against a real tritonserver: what it calls an error the server refuses, what it passes the server loads.

One server for all of it, which loads models by name: each mistake is a model of its own beside the real ones.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc
from mistakes import Mistake, copied_repository
from mistakes_ensembles import DITPACK, ENSEMBLES
from mistakes_models import MODELS, SYNTAX
from server_tools import REQUIRE_SERVER, SHARED_MEMORY, TIMEOUT, wait_until
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import ServeError
from ditpack.tritonserver.launch.find import find_tritonserver
from ditpack.tritonserver.launch.ports import take_ports
from ditpack.tritonserver.launch.prepare import environment, prepare_directory

pytestmark = pytest.mark.server

STEPS = ("prepare", "text_encoder", "dit", "vae_decoder")


@dataclass
class Loader:
    """A server that loads what it is told to from ``repository``, which may grow meanwhile."""

    repository: Path
    log: Path
    client: tritonclient.grpc.InferenceServerClient

    def load(self, name: str) -> str | None:
        """None when it loads, else all that the server says; it is gone again afterwards."""
        start = self.log.stat().st_size
        try:
            self.client.load_model(name, client_timeout=TIMEOUT)
        except InferenceServerException as error:
            # The parser complains on the log alone.
            return f"{error.message()}\n{self.log.read_bytes()[start:].decode('utf-8', 'replace')}"
        self.client.unload_model(name, client_timeout=TIMEOUT)
        return None


@pytest.fixture(scope="module")
def loader(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    repository = copied_repository(tmp_path_factory.mktemp("check") / "model_repository")
    log = repository.parent / "log"
    directory = Path(tempfile.mkdtemp(prefix="ditpack-test-"))
    prefix = f"ditpack_test_{os.getpid()}_"
    try:
        installation = prepare_directory(find_tritonserver(), directory)
        ports = take_ports("127.0.0.1", {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0})
    except ServeError as error:
        shutil.rmtree(directory)
        if os.environ.get(REQUIRE_SERVER):
            raise
        pytest.skip(f"no tritonserver can run here: {error}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(installation.binary),
                f"--model-repository={repository}",
                f"--backend-directory={installation.backends}",
                "--model-control-mode=explicit",
                "--disable-auto-complete-config",
                f"--backend-config=python,shm-region-prefix-name={prefix}",
                *(f"{option}={port}" for option, port in ports.items()),
            ],
            stdout=output,
            stderr=output,
            env=environment(installation, directory, tiny_checkpoint, os.environ),
        )
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{ports['--grpc-port']}")
    try:
        wait_until("the server is live", lambda: _is_live(client))
        for step in STEPS:
            client.load_model(step, client_timeout=TIMEOUT)
        yield Loader(repository, log, client)
    finally:
        client.close()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(TIMEOUT)
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(directory)
            for region in SHARED_MEMORY.glob(f"{prefix}*"):
                region.unlink()


def _is_live(client: tritonclient.grpc.InferenceServerClient) -> bool:
    try:
        return bool(client.is_server_live())
    except InferenceServerException:
        return False


@pytest.mark.parametrize("mistake", [*SYNTAX, *MODELS, *ENSEMBLES, *DITPACK], ids=lambda mistake: mistake.name)
def test_the_server_refuses_it_too(loader: Loader, mistake: Mistake) -> None:
    name = "mistake_" + "".join(letter if letter.isalnum() else "_" for letter in mistake.name)
    directory = loader.repository / name
    shutil.copytree(loader.repository / mistake.model, directory)
    mistake.make(directory)
    answer = loader.load(name)
    shutil.rmtree(directory)
    if mistake.refused is None:
        assert answer is None
    else:
        assert answer is not None, "the server loads it"
        assert mistake.refused in answer
