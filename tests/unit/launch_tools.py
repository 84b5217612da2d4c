"""Installations of tritonserver that are files without content."""

from __future__ import annotations

import sys
from pathlib import Path

MINOR = sys.version_info.minor


def executable(path: Path, content: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


def embedded_layout(root: Path, minors: tuple[int, ...] = (MINOR,)) -> Path:
    """The layout of nvidia-pytriton with empty files; returns the binary."""
    server = root / "pytriton" / "tritonserver"
    (server / "backends" / "python").mkdir(parents=True)
    (server / "backends" / "python" / "libtriton_python.so").touch()
    (root / "nvidia_pytriton.libs").mkdir()
    for minor in minors:
        executable(server / "python_backend_stubs" / f"3.{minor}" / "triton_python_backend_stub")
    return executable(server / "bin" / "tritonserver")
