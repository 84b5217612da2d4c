"""perf_analyzer against the ensemble, as an operator runs it: mixed sizes from an input file, several at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from server_tools import metric
from tools.perf_analyzer import PerfAnalyzer, find_or_fetch
from typer.testing import CliRunner

from ditpack.cli.app import build_app
from ditpack.tritonserver.launch import TritonServer

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
MIXED, EDITS = (Path(__file__).with_name(name) for name in ("perf_mixed.json", "perf_edit.json"))
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
    measure(server, perf_analyzer, protocol, "qwen_image", MIXED, tmp_path)


def test_edits_from_a_file(edit_server: TritonServer, perf_analyzer: PerfAnalyzer, tmp_path: Path) -> None:
    """Two small images, as base64, alone and together."""
    measure(edit_server, perf_analyzer, "http", "qwen_image_edit", EDITS, tmp_path)


def measure(
    server: TritonServer, perf_analyzer: PerfAnalyzer, protocol: str, model: str, inputs: Path, directory: Path
) -> None:
    address = server.http_url.removeprefix("http://") if protocol == "http" else server.grpc_url
    shared = metric(server, "ditpack_shared_steps_total")
    export = directory / "profile.json"  # holds the answers as text, so the inputs ask for base64
    done = perf_analyzer.run(
        *("-m", model, "-u", address, "-i", protocol),
        *("--input-data", str(inputs), "--concurrency-range", "4", "--request-count", str(REQUESTS)),
        *("--profile-export-file", str(export)),
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    throughput = re.search(r"Throughput: ([\d.]+) infer/sec", done.stdout)
    assert throughput is not None, done.stdout
    assert float(throughput[1]) > 0
    # Of an input with two strings it writes the second one's length as it is.
    profile = json.loads(export.read_text("utf-8", "replace"), strict=False)
    requests = profile["experiments"][0]["requests"]
    assert len(requests) >= REQUESTS
    assert all(request["response_timestamps"] for request in requests)
    assert metric(server, "ditpack_shared_steps_total") > shared, "four at a time, and no step was shared"


def test_ditpack_bench(
    server: TritonServer, perf_analyzer: PerfAnalyzer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep against the real server: its metrics and the pictures' times are in the results."""
    for name, value in perf_analyzer.environment.items():
        monkeypatch.setenv(name, value)
    arguments = ["bench", "--server", server.http_url, "--metrics", server.metrics_url, "--sizes", "64x64,96x64"]
    arguments += ["--steps", "4", "--concurrency", "1,4", "--requests", "12", "-o", str(tmp_path)]
    arguments += ["--perf-analyzer", str(perf_analyzer.binary)]
    result = CliRunner().invoke(build_app(arguments), arguments)
    assert result.exit_code == 0, result.output
    alone, four = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (alone["requests"], four["requests"]) == (12, 12)
    assert alone["pack"] == 1.0
    assert four["pack"] > 1.0, "four at a time, and no step was shared"
    assert four["metrics"]["ditpack_requests_total"] >= 12
    assert four["metrics"]["nv_inference_request_success"] >= 12
    assert (tmp_path / "results.png").stat().st_size > 10_000
