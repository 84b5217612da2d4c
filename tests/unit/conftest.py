"""Triton's Python module exists only inside its stub process; here a double stands in for it."""

from __future__ import annotations

import sys
from pathlib import Path

import fake_pb_utils

sys.modules.setdefault("triton_python_backend_utils", fake_pb_utils)
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
