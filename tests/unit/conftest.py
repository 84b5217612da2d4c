"""Triton's Python module exists only inside its stub process; here a double stands in for it."""

from __future__ import annotations

import sys

import fake_pb_utils

sys.modules.setdefault("triton_python_backend_utils", fake_pb_utils)
