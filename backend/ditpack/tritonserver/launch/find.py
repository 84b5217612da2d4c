"""Where the tritonserver to run is, and what lies beside it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from ditpack.tritonserver.launch.serve_error import ServeError

ENVIRONMENT_VARIABLE = "DITPACK_TRITONSERVER"
NGC_LOCATION = Path("/opt/tritonserver/bin/tritonserver")
_EMBEDDED_GLIBC = (2, 35)
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver binary and its directories; None where it keeps to what it was built with.

    ``stubs`` (one folder for each Python minor version) and ``libraries`` are those of the embedded one in
    nvidia-pytriton, whose Python backend has to be put together before it can run.
    """

    binary: Path
    backends: Path | None
    stubs: Path | None = None
    libraries: Path | None = None

    @property
    def embedded(self) -> bool:
        return self.stubs is not None

    def stub(self) -> Path | None:
        """The Python backend's stub for the running Python; None if only the server knows where it is.

        Raises:
            ServeError: when there is none for this Python.
        """
        minor = sys.version_info.minor
        if self.stubs is not None:
            stub = self.stubs / f"3.{minor}" / _STUB
            if not stub.is_file():
                have = sorted((path.name for path in self.stubs.iterdir()), key=lambda name: int(name.split(".")[1]))
                raise ServeError(
                    f"The embedded tritonserver has no Python backend for Python 3.{minor}; it has {', '.join(have)}.",
                    "Install ditpack into a virtual environment made with one of those, or set "
                    f"{ENVIRONMENT_VARIABLE} to a tritonserver of your own.",
                )
            return stub
        if self.backends is None:
            return None
        stub = self.backends / "python" / _STUB
        if not stub.is_file():
            return None
        linked = re.search(rb"libpython3\.(\d+)\.so", stub.read_bytes())
        if linked and int(linked[1]) != minor:
            raise ServeError(
                f"The Python backend of {self.binary} runs Python 3.{int(linked[1])}, and this is Python 3.{minor}.",
                f"Install ditpack for Python 3.{int(linked[1])} and run it there.",
            )
        return stub


def find_tritonserver(explicit: str | Path | None = None) -> Installation:
    """The first of: ``explicit``, ``$DITPACK_TRITONSERVER``, PATH, the NGC images' location, the embedded one.

    Raises:
        ServeError: when there is none, or the one asked for is not there.
    """
    if sys.platform != "linux":
        raise ServeError(f"tritonserver runs on Linux, and this is {sys.platform}.", "Use Linux, WSL 2 or a container.")
    named = explicit or os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        binary = Path(named).expanduser()
        if not (binary.is_file() and os.access(binary, os.X_OK)):
            origin = "--tritonserver" if explicit else f"${ENVIRONMENT_VARIABLE}"
            raise ServeError(
                f"{origin} is {binary}, which is no executable file.",
                "Give the path of the tritonserver binary, or leave it out to have one found.",
            )
        return _around(binary)
    on_path = shutil.which("tritonserver")
    if on_path:
        return _around(Path(on_path))
    if NGC_LOCATION.is_file():
        return _around(NGC_LOCATION)
    embedded = _embedded_binary()
    if embedded is None:
        raise ServeError(
            f"No tritonserver: none on PATH, at {NGC_LOCATION} or embedded in this Python ({sys.executable}).",
            'Get the embedded one with: pip install "ditpack[server]"',
        )
    return _around(embedded)


def _embedded_binary() -> Path | None:
    spec = importlib.util.find_spec("pytriton")  # found, not imported: importing it changes process-wide state
    for directory in (spec.submodule_search_locations if spec else None) or ():
        binary = Path(directory) / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return binary
    return None


def _around(binary: Path) -> Installation:
    binary = binary.resolve()
    root = binary.parent.parent
    backends, stubs = root / "backends", root / "python_backend_stubs"
    if stubs.is_dir():
        _check_glibc()
        libraries = root.parent.parent / "nvidia_pytriton.libs"
        return Installation(binary, backends, stubs, libraries)
    return Installation(binary, backends if (backends / "python").is_dir() else None)


def _check_glibc() -> None:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # not glibc: musl has no such name
        version = ""
    match = re.fullmatch(r"glibc (\d+)\.(\d+).*", version)
    if match is None or (int(match[1]), int(match[2])) < _EMBEDDED_GLIBC:
        raise ServeError(
            f"The embedded tritonserver needs glibc 2.35 or newer; this system has {version or 'another C library'}.",
            "Use a newer system (Ubuntu 22.04, Debian 12, RHEL 10 or later) or an NGC container of tritonserver.",
        )
