"""The linter against a real tritonserver: what it calls an error the server refuses, what it passes the server loads.

One server for all of it, which loads models by name: each mistake is a model of its own beside the real ones.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc
from mistakes import ENSEMBLE, Mistake, copied_repository
from mistakes_ensembles import DITPACK, ENSEMBLES, MACHINE
from mistakes_models import MODELS, SYNTAX
from server_tools import REQUIRE_SERVER, SHARED_MEMORY, TIMEOUT, wait_until
from tritonclient.utils import InferenceServerException
from valid_edits import read, rebatch, rewire, write

from ditpack.models.checkpoint import open_checkpoint
from ditpack.tritonserver.launch import ServeError
from ditpack.tritonserver.launch.find import find_tritonserver
from ditpack.tritonserver.launch.ports import take_ports
from ditpack.tritonserver.launch.prepare import environment, prepare_directory
from ditpack.tritonserver.launch.repository import find_repository

pytestmark = pytest.mark.server


_PREFIX = "mistake_"
# In a model that Triton shall load, so that it loads in no time: its config is the real one, but nothing is behind it.
_EMPTY_DOOR = "class TritonPythonModel:\n    def execute(self, requests):\n        raise NotImplementedError\n"


@dataclass
class Loader:
    """A server that loads what it is told to from ``repository``, which may grow meanwhile."""

    repository: Path
    log: Path
    client: tritonclient.grpc.InferenceServerClient

    def load(self, name: str) -> str | None:
        """None when it loads, else all that the server says. It is gone again afterwards, its steps are not."""
        start = self.log.stat().st_size
        try:
            self.client.load_model(name, client_timeout=TIMEOUT)
        except InferenceServerException as error:
            # The parser complains on the log alone; there Triton also repeats what is wrong with models of before.
            lines = self.log.read_bytes()[start:].decode("utf-8", "replace").splitlines()
            return "\n".join([str(error.message()), *(line for line in lines if name in line or _PREFIX not in line)])
        self.client.unload_model(name, client_timeout=TIMEOUT)
        return None


@pytest.fixture(scope="module")
def loader(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    repository = copied_repository(tmp_path_factory.mktemp("check") / "model_repository")
    for door in repository.glob("*/1/model.py"):
        door.write_text(_EMPTY_DOOR)
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
            env=environment(installation, directory, open_checkpoint(tiny_checkpoint), os.environ),
        )
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{ports['--grpc-port']}")
    try:
        wait_until("the server is live", lambda: _is_live(client))
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


@pytest.mark.parametrize(
    "mistake", [*SYNTAX, *MODELS, *ENSEMBLES, *DITPACK, *MACHINE], ids=lambda mistake: mistake.name
)
def test_the_server_refuses_it_too(loader: Loader, mistake: Mistake) -> None:
    name = _PREFIX + "".join(letter if letter.isalnum() else "_" for letter in mistake.name)
    directory = loader.repository / name
    shutil.copytree(find_repository(None) / mistake.model, directory)
    if mistake.refused is None and mistake.file == "config.pbtxt" and (door := directory / "1" / "model.py").exists():
        door.write_text(_EMPTY_DOOR)
    mistake.make(directory)
    answer = loader.load(name)
    shutil.rmtree(directory)
    if mistake.refused is None:
        assert answer is None
    else:
        assert answer is not None, "the server loads it"
        assert mistake.refused in answer


@pytest.mark.parametrize("seed", range(12))
def test_the_server_loads_rewired_ensembles(loader: Loader, seed: int) -> None:
    directory = loader.repository / f"rewired_{seed}"
    shutil.copytree(loader.repository / ENSEMBLE, directory)
    config = read(directory)
    rewire(config, random.Random(seed))
    write(directory, config)
    assert loader.load(directory.name) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_server_loads_other_batching(loader: Loader, seed: int) -> None:
    directory = loader.repository / f"rebatched_{seed}"
    shutil.copytree(loader.repository / "prepare", directory)
    config = read(directory)
    rebatch(config, random.Random(seed))
    write(directory, config)
    assert loader.load(directory.name) is None
