"""One real tritonserver with the tiny checkpoint for all of these tests, and clients to it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_tools import NARROW_QUEUE, Caller, edited_repository, parameter, serving

from ditpack.tritonserver.launch import TritonServer

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Shared by all tests: leave it idle. When it has stopped, no process, thread or shared memory of it is left."""
    before = set(threading.enumerate())
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("server") / "tritonserver.log") as started:
        yield started
    left = [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]
    assert not left, f"threads {left} outlived the server's clients"


@pytest.fixture(scope="session")
def edit_server(tiny_edit_2509_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One with a checkpoint that edits; shared and idle likewise."""
    with serving(tiny_edit_2509_checkpoint, tmp_path_factory.mktemp("edit-server") / "tritonserver.log") as started:
        yield started


@pytest.fixture(scope="session")
def narrow(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One request at a time takes steps, NARROW_QUEUE wait; shared and idle likewise."""
    directory = tmp_path_factory.mktemp("narrow")
    edits = [parameter("max_queue_size", str(NARROW_QUEUE)), parameter("token_budget", "64")]
    repository = edited_repository(directory / "model_repository", {"dit": edits})
    with serving(tiny_checkpoint, directory / "tritonserver.log", repository) as started:
        yield started


@pytest.fixture(params=["http", "grpc"])
def caller(request: pytest.FixtureRequest, server: TritonServer) -> Iterator[Caller]:
    """Each test that uses it runs over HTTP and over gRPC."""
    opened = Caller(server, request.param)
    yield opened
    opened.close()


@pytest.fixture
def http_caller(server: TritonServer) -> Iterator[Caller]:
    opened = Caller(server, "http")
    yield opened
    opened.close()


@pytest.fixture
def grpc_caller(server: TritonServer) -> Iterator[Caller]:
    opened = Caller(server, "grpc")
    yield opened
    opened.close()
