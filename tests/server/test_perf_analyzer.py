"""perf_analyzer against the ensemble, as an operator runs it: mixed sizes from an input file, several at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from server_tools import metric
from tools.perf_analyzer import PerfAnalyzer, find_or_fetch

from ditpack.tritonserver.launch import TritonServer

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
INPUTS = Path(__file__).with_name("perf_mixed.json")
REQUESTS = 24


@pytest.fixture(scope="module")
def perf_analyzer() -> PerfAnalyzer:
    found = find_or_fetch(ROOT / ".cache")
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_mixed_sizes_from_a_file(
    server: TritonServer, perf_analyzer: PerfAnalyzer, protocol: str, tmp_path: Path
) -> None:
    address = server.http_url.removeprefix("http://") if protocol == "http" else server.grpc_url
    shared = metric(server, "ditpack_shared_steps_total")
    export = tmp_path / "profile.json"  # holds the answers as text, so the inputs ask for base64
    done = perf_analyzer.run(
        *("-m", "qwen_image", "-u", address, "-i", protocol),
        *("--input-data", str(INPUTS), "--concurrency-range", "4", "--request-count", str(REQUESTS)),
        *("--profile-export-file", str(export)),
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    throughput = re.search(r"Throughput: ([\d.]+) infer/sec", done.stdout)
    assert throughput is not None, done.stdout
    assert float(throughput[1]) > 0
    requests = json.loads(export.read_text())["experiments"][0]["requests"]
    assert len(requests) >= REQUESTS
    assert all(request["response_timestamps"] for request in requests)
    assert metric(server, "ditpack_shared_steps_total") > shared, "four at a time, and no step was shared"
