"""``ditpack bench`` with a stand-in for perf_analyzer; tests/server runs the real one."""

from __future__ import annotations

import base64
import csv
import io
import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from ditpack.cli.app import build_app
from ditpack_client.bench import perf
from ditpack_client.bench.inputs import OFFICIAL_SIZES, requests

WIRE = [
    "PROMPT",
    "WIDTH",
    "HEIGHT",
    "NUM_INFERENCE_STEPS",
    "TRUE_CFG_SCALE",
    "SEED",
    "OUTPUT_FORMAT",
    "RESPONSE_FORMAT",
]
# Sends a request every 0.5 s, answered after 1, 2, 3 … s, and notes what it was asked for.
FAKE = f"""#!{sys.executable}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print(json.dumps(options), file=open({{log!r}}, "a"))
count = int(options["--request-count"])
requests = [
    {{{{"timestamp": i * 500_000_000, "response_timestamps": [i * 500_000_000 + (i + 1) * 1_000_000_000]}}}}
    for i in range(count)
]
json.dump({{{{"experiments": [{{{{"requests": requests}}}}]}}}}, open(options["--profile-export-file"], "x"))
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    binary = tmp_path / "perf_analyzer"
    binary.write_text(FAKE.format(log=str(tmp_path / "calls")))
    binary.chmod(0o755)
    return binary


def calls(fake: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in fake.with_name("calls").read_text().splitlines()]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(["bench"]), ["bench", *arguments])


class TestInputs:
    def test_every_size_with_every_prompt_and_seeds_of_their_own(self) -> None:
        data = requests(OFFICIAL_SIZES, 20, 4.0, WIRE)["data"]
        assert {(entry["WIDTH"][0], entry["HEIGHT"][0]) for entry in data} == set(OFFICIAL_SIZES)
        assert len({entry["SEED"][0] for entry in data}) == len(data)
        assert len({(*entry["WIDTH"], *entry["HEIGHT"], *entry["PROMPT"]) for entry in data}) == len(data)
        assert {entry["NUM_INFERENCE_STEPS"][0] for entry in data} == {20}
        assert "TRUE_CFG_SCALE" not in requests(OFFICIAL_SIZES, 20, None, WIRE)["data"][0]

    def test_edits_bring_pictures(self) -> None:
        data = requests([(96, 64)], 4, None, [*WIRE, "IMAGES"], images=2)["data"]
        assert data[0]["IMAGES"]["shape"] == [2]
        pictures = [Image.open(io.BytesIO(base64.b64decode(text))) for text in data[0]["IMAGES"]["content"]]
        assert [picture.size for picture in pictures] == [(96, 64)] * 2
        assert data[0]["IMAGES"]["content"][0] != data[0]["IMAGES"]["content"][1]


def test_timing() -> None:
    timing = perf.Timing((0.0, 1.0, 2.0, 3.0), (1.0, 3.0, 5.0, 7.0))
    assert timing.latencies == [1, 2, 3, 4]
    assert (timing.throughput, timing.arrived) == (4 / 7, 1.0)
    assert [timing.percentile(share) for share in (0, 0.5, 0.75, 0.95, 1)] == [1, 2, 3, 4, 4]


def test_a_sweep(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ditpack_client.bench.command._input_names", lambda address, model: WIRE)
    out = tmp_path / "out"
    arguments = ["--perf-analyzer", str(fake), "--sizes", "64x64,96x64", "--concurrency", "1,4", "-o", str(out)]
    for _ in range(2):  # results of before are replaced
        result = run(*arguments)
        assert result.exit_code == 0, result.output
    assert [(call.get("--concurrency-range"), call["--request-count"]) for call in calls(fake)[:3]] == [
        ("1", "2"),
        ("1", "16"),
        ("4", "32"),
    ]
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [(row["load"], row["requests"], float(row["p50"]), float(row["p95"])) for row in rows] == [
        ("1 at a time", "16", 8.0, 16.0),
        ("4 at a time", "32", 16.0, 31.0),
    ]
    document = json.loads((out / "results.json").read_text())
    assert document["setting"]["sizes"] == "64x64,96x64"
    assert [row["load"] for row in document["rows"]] == ["1 at a time", "4 at a time"]
    assert Image.open(out / "results.png").size == (960, 600)
    assert "32" in result.output


def test_rates(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ditpack_client.bench.command._input_names", lambda address, model: WIRE)
    result = run("--perf-analyzer", str(fake), "--sizes", "64x64", "--rates", "0.5,2", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert [call["--request-rate-range"] for call in calls(fake)[1:]] == ["0.5", "2"]
    assert {call["--request-distribution"] for call in calls(fake)[1:]} == {"poisson"}


class TestErrors:
    def test_no_perf_analyzer(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        result = run("-o", str(tmp_path / "out"))
        assert result.exit_code == 1
        assert "pip install perf-analyzer" in result.output
        assert "tritonserver:" in result.output

    def test_no_server(self, fake: Path, tmp_path: Path) -> None:
        result = run("--server", "localhost:1", "--perf-analyzer", str(fake), "-o", str(tmp_path / "out"))
        assert result.exit_code == 1
        assert "localhost:1 does not serve qwen_image" in result.output

    @pytest.mark.parametrize(
        "wrong", [["--concurrency", "0"], ["--concurrency", "two"], ["--rates", "nan"], ["--sizes", "big"]]
    )
    def test_wrong_options(self, fake: Path, tmp_path: Path, wrong: list[str]) -> None:
        result = run("--perf-analyzer", str(fake), "-o", str(tmp_path / "out"), *wrong)
        assert result.exit_code == 2
        assert wrong[1] in result.output

    def test_perf_analyzer_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ditpack_client.bench.command._input_names", lambda address, model: WIRE)
        binary = tmp_path / "perf_analyzer"
        binary.write_text("#!/bin/sh\necho usage\necho 'Error: no such model' >&2\nexit 99\n")
        binary.chmod(0o755)
        result = run("--perf-analyzer", str(binary), "-o", str(tmp_path / "out"))
        assert result.exit_code == 1
        assert "perf_analyzer ended with 99: Error: no such model" in result.output
