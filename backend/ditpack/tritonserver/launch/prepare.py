"""The private directory, environment and command line that one server runs with."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ditpack.engine.channel import DIRECTORY_VARIABLE
from ditpack.models.checkpoint import ENVIRONMENT_VARIABLE as CHECKPOINT_VARIABLE
from ditpack.models.checkpoint import WEIGHTS_VARIABLE, Checkpoint
from ditpack.tritonserver.launch.find import Installation
from ditpack.tritonserver.launch.interpreter import bin_directory, require_libpython

# APIs that no client of an image server needs, locked with a key that nobody has: they load and unload models (which
# ones run is decided here), map the host's shared memory, and change what is traced and logged.
_LOCKED = "model-repository,shared-memory,trace,logging"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a server is started with; ``ports`` maps tritonserver's option to the port."""

    repository: Path
    models: Sequence[str]
    host: str
    ports: Mapping[str, int]
    exit_timeout: int
    shm_prefix: str
    options: tuple[str, ...] = ()


def prepare_directory(installation: Installation, directory: Path) -> Installation:
    """Put the Python backend together in ``directory`` where it is not together yet; returns what to run.

    The embedded server ships one stub for each Python; its backend directory must hold the right one.

    Raises:
        ServeError: there is no stub for this Python, or no shared libpython that it could load.
    """
    stub = installation.stub()
    if not installation.embedded or installation.backends is None or stub is None:
        return installation
    python = directory / "backends" / "python"
    python.mkdir(parents=True)
    for file in (*(installation.backends / "python").iterdir(), stub):
        if file.is_file():
            (python / file.name).symlink_to(file)
    # One file, not its directory: an interpreter's lib (conda's, say) has libraries that tritonserver must not meet.
    libraries = directory / "lib"
    libraries.mkdir()
    libpython = require_libpython()
    (libraries / libpython.name).symlink_to(libpython)
    return Installation(installation.binary, directory / "backends", installation.stubs, installation.libraries)


def run_directory(directory: Path) -> Path:
    """Where the server's engines listen for cancels, watchers and the order to drain."""
    return directory / "run"


def environment(
    installation: Installation, directory: Path, checkpoint: Checkpoint, base: Mapping[str, str]
) -> dict[str, str]:
    """``base`` with what the server and its models need on top."""
    result = dict(base)
    result[CHECKPOINT_VARIABLE] = str(checkpoint.path)
    result[WEIGHTS_VARIABLE] = checkpoint.weights
    result[DIRECTORY_VARIABLE] = str(run_directory(directory))
    # Each model is a process with OpenMP threads of its own. On a CPU, threads that spin while they wait take the cores
    # from the other models: much slower when the machine is busy, and hardly faster when it is not.
    result.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    result["PATH"] = os.pathsep.join(filter(None, (str(bin_directory()), base.get("PATH", os.defpath))))
    if installation.libraries:
        paths = (str(directory / "lib"), str(installation.libraries), base.get("LD_LIBRARY_PATH"))
        result["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    return result


def command_line(installation: Installation, settings: Settings) -> list[str]:
    """tritonserver's arguments."""
    locked = f"{_LOCKED}:ditpack={secrets.token_hex(16)}"
    command = [
        str(installation.binary),
        f"--model-repository={settings.repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in settings.models),
        f"--http-restricted-api={locked}",
        f"--grpc-restricted-protocol={locked}",
        # The configs are complete; completing them would import every model.py in a process of its own first.
        "--disable-auto-complete-config",
        f"--http-address={settings.host}",
        f"--grpc-address={settings.host}",
        f"--metrics-address={settings.host}",
        *(f"{option}={port}" for option, port in settings.ports.items()),
        f"--exit-timeout-secs={settings.exit_timeout}",
        "--log-format=ISO8601",
        f"--backend-config=python,shm-region-prefix-name={settings.shm_prefix}",
    ]
    if installation.backends:
        command.append(f"--backend-directory={installation.backends}")
    return [*command, *settings.options]
