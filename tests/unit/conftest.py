"""Triton's Python module exists only inside its stub process; here a double stands in for it. And a fake server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fake_pb_utils
import pytest
from fake_kserve import Painter, serve_grpc, serve_http

sys.modules.setdefault("triton_python_backend_utils", fake_pb_utils)
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, painter: Painter) -> Iterator[str]:
    """The address of a fake server, of each protocol, behind which is the test file's own ``painter``."""
    with (serve_http if request.param == "http" else serve_grpc)(painter) as address:
        yield address
