"""The command line of the linter: output, JSON, exit codes, and ``serve`` that runs it first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mistakes import ENSEMBLE, copied_repository, swap
from typer.testing import CliRunner, Result

from ditpack.cli.app import build_app

SHORT = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 300 } }"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(arguments), [*arguments])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return copied_repository(tmp_path / "model_repository")


def edit(repository: Path, model: str, old: str, new: str) -> int:
    """Replace the only ``old``; returns its line."""
    file = repository / model / "config.pbtxt"
    text = file.read_text()
    file.write_text(swap(old, new)(text))
    return text.count("\n", 0, text.index(old)) + 1


def test_a_clean_repository(repository: Path) -> None:
    result = run("check", str(repository), "--configs-only", "--strict")
    assert (result.exit_code, result.output) == (0, "model_repository: no errors, no warnings\n")


def test_text(repository: Path) -> None:
    unknown = edit(repository, ENSEMBLE, "max_batch_size: 0", "max_batch: 0")
    timeout = edit(repository, "dit", "dynamic_batching { }", SHORT)
    result = run("check", str(repository), "--configs-only")
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        f"model_repository/dit/config.pbtxt:{timeout}:43: warning: requests may wait 300 microseconds, less than a "
        "millisecond [timeout]",
        "    If milliseconds were meant, write 300000; for seconds, 300000000.",
        f"model_repository/qwen_image/config.pbtxt:{unknown}:1: error: a model's config has no field 'max_batch' "
        "[unknown-field]",
        "    Did you mean 'max_batch_size'?",
        "model_repository: 1 error, 1 warning",
    ]


def test_json(repository: Path) -> None:
    line = edit(repository, ENSEMBLE, 'model_name: "dit"', 'model_name: "dti"')
    result = run("check", str(repository), "--configs-only", "--json")
    assert result.exit_code == 1
    assert json.loads(result.output) == {
        "repository": str(repository),
        "errors": 1,
        "warnings": 0,
        "findings": [
            {
                "file": "model_repository/qwen_image/config.pbtxt",
                "line": line,
                "column": 7,
                "severity": "error",
                "rule": "step-model",
                "message": "there is no model 'dti' in this repository",
                "fix": "Did you mean 'dit'?",
            }
        ],
    }


def test_warnings_alone_are_no_failure_unless_strict(repository: Path) -> None:
    edit(repository, "dit", "dynamic_batching { }", SHORT)
    assert run("check", str(repository), "--configs-only").exit_code == 0
    assert run("check", str(repository), "--configs-only", "--strict").exit_code == 1


def test_no_repository_is_2(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        result = run("check", str(path))
        assert result.exit_code == 2
        assert str(path) in result.output


def test_the_machine_can_be_described(repository: Path) -> None:
    edit(repository, "dit", "kind: KIND_AUTO", "kind: KIND_GPU gpus: [ 3 ]")
    assert run("check", str(repository), "--gpus", "4").exit_code == 0
    result = run("check", str(repository), "--gpus", "2")
    assert result.exit_code == 1
    assert "GPU 3 does not exist; there are 2 GPUs here" in result.output
    assert run("check", str(repository), "--configs-only").exit_code == 0


def test_serve_starts_nothing_that_has_errors(repository: Path) -> None:
    line = edit(repository, ENSEMBLE, 'model_name: "dit"', 'model_name: "dti"')
    result = run("serve", "--model-repository", str(repository))
    assert result.exit_code == 1
    assert f"model_repository/qwen_image/config.pbtxt:{line}:7: error: there is no model 'dti'" in result.output
    assert "Not started: 1 error in the model repository." in result.output
    assert "Starting" not in result.output
