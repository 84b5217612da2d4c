"""What an image server's clients have no use for is locked."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
import tritonclient.grpc
from server_tools import TIMEOUT
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer

pytestmark = pytest.mark.server


def status(server: TritonServer, path: str, body: bytes | None = None) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(f"{server.http_url}{path}", body), timeout=TIMEOUT) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/systemsharedmemory/status", None),
        ("/v2/systemsharedmemory/region/x/register", b'{"key": "/x", "offset": 0, "byte_size": 64}'),
        ("/v2/trace/setting", b'{"trace_level": ["TIMESTAMPS"]}'),
        ("/v2/logging", b'{"log_verbose_level": 4}'),
    ],
)
def test_over_http(server: TritonServer, path: str, body: bytes | None) -> None:
    assert status(server, path, body) == 403


def test_models_cannot_be_unloaded(server: TritonServer) -> None:
    assert status(server, "/v2/repository/models/dit/unload", b"{}") != 200
    assert status(server, "/v2/models/dit/ready") == 200


def test_over_grpc(server: TritonServer) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        for call in (
            client.get_system_shared_memory_status,
            lambda **options: client.register_system_shared_memory("x", "/x", 64, **options),
            lambda **options: client.update_log_settings({"log_verbose_level": 4}, **options),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call(client_timeout=TIMEOUT)


def test_what_monitoring_needs_is_open(server: TritonServer) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/dit/config", "/v2/models/dit/stats"):
        assert status(server, path) == 200
