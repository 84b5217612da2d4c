"""The Python that the server's models run in, and the shared library that its stubs load.

A stub is a program of its own with Python inside. It finds its interpreter's packages through ``python3`` on PATH;
those of tritonserver 2.51 ignore PYTHONPATH. So ditpack must be installed, and the running Python be first on PATH.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ditpack.tritonserver.launch.serve_error import ServeError

_PROBE = (
    "import importlib.util, json, sys; "
    "print(json.dumps([sys.version_info.minor, sys.prefix, importlib.util.find_spec('ditpack') is not None]))"
)
_PROBE_SECONDS = 60.0


def bin_directory() -> Path:
    """The running interpreter's directory; links stay as they are, since a virtual environment is one."""
    return Path(sys.executable).parent


def check_interpreter(needs_ditpack: bool) -> None:
    """Make sure that ``python3`` beside the running interpreter is the same Python and, if asked, has ditpack.

    Raises:
        ServeError: when it is another one, is missing, or lacks ditpack.
    """
    python = bin_directory() / "python3"
    advice = "Make a virtual environment (python3 -m venv), install ditpack into it and run that one's ditpack."
    try:
        # -I: as isolated as the stub's own interpreter is.
        probe = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True
        )
        minor, prefix, has_ditpack = json.loads(probe.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ServeError(f"The server's models run in {python}, which does not work: {error}", advice) from None
    if (minor, prefix) != (sys.version_info.minor, sys.prefix):
        raise ServeError(
            f"The server's models would run in {python} (Python 3.{minor} in {prefix}), not in {sys.executable}.",
            advice,
        )
    if needs_ditpack and not has_ditpack:
        raise ServeError(
            f"ditpack is not installed in {python}, where the server's models run (PYTHONPATH is ignored there).",
            f'Install it: {python} -m pip install "ditpack[server]", or -e ".[server]" in a checkout.',
        )


def libpython_name() -> str:
    return f"libpython3.{sys.version_info.minor}.so.1.0"


def find_libpython() -> Path | None:
    """The shared library of the running Python's minor version; this interpreter's own before the system's."""
    name = libpython_name()
    return next((directory / name for directory in _directories() if (directory / name).is_file()), None)


def require_libpython() -> Path:
    """As ``find_libpython``.

    Raises:
        ServeError: when it is missing, with the ways to get it.
    """
    found = find_libpython()
    if found is None:
        version = f"3.{sys.version_info.minor}"
        raise ServeError(
            f"The embedded tritonserver needs the shared library {libpython_name()}, and {sys.executable} has none.",
            f"Debian, Ubuntu: apt-get install libpython{version}; conda and 'uv python install {version}' bring it; "
            f"pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {version}.",
        )
    return found


def _directories() -> Iterator[Path]:
    libdir, multiarch = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("MULTIARCH")
    if libdir:
        yield Path(libdir)
    yield Path(sys.base_prefix) / "lib"
    yield Path(sys.prefix) / "lib"
    yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    yield from _ldconfig()
    for root in ("/usr/local/lib", "/usr/lib", "/lib"):
        if multiarch:
            yield Path(root) / multiarch
        yield Path(f"{root}64")
        yield Path(root)


def _ldconfig() -> Iterator[Path]:
    for program in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        try:
            listing = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):  # there is none here: the common directories follow
            continue
        for match in re.finditer(rf"{re.escape(libpython_name())} .*=> (\S+)", listing):
            yield Path(match[1]).parent
        return


if __name__ == "__main__":  # the Makefile asks whether this Python can run the embedded server
    try:
        print(require_libpython())
    except ServeError as error:
        sys.exit(str(error))
