"""The Triton language (not the server), or on a CPU-only install stand-ins under which kernels can still be read."""

from __future__ import annotations

import importlib.util
from typing import Any

INSTALLED = importlib.util.find_spec("triton") is not None

if INSTALLED:
    import triton
    import triton.language as tl
else:

    class _Absent:
        constexpr: Any = None

        def jit(self, function: Any) -> Any:
            return function

    triton = tl = _Absent()

__all__ = ["INSTALLED", "tl", "triton"]
