"""``ditpack check`` against a machine: GPUs, memory, the tritonserver, checkpoints and their families."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from mistakes import ENSEMBLE, Mistake, append, copied_repository, swap
from mistakes_ensembles import MACHINE

from ditpack.tritonserver.check import Finding, Machine, check_repository, machine_rules, this_machine
from ditpack.tritonserver.check.machine import gpu_memory
from ditpack.tritonserver.launch import ServeError
from ditpack.tritonserver.launch.find import Installation
from ditpack.tritonserver.launch.repository import find_repository

GIB = 2**30


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return copied_repository(tmp_path / "model_repository")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """Laid out as the embedded one, for this Python."""
    monkeypatch.setattr(machine_rules, "require_libpython", lambda: Path("libpython"))
    stub = tmp_path / "stubs" / f"3.{sys.version_info.minor}" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.touch()
    (tmp_path / "backends" / "python").mkdir(parents=True)
    return Installation(tmp_path / "tritonserver", tmp_path / "backends", None, tmp_path / "stubs")


def edit(repository: Path, model: str, old: str, new: str) -> None:
    file = repository / model / "config.pbtxt"
    file.write_text(swap(old, new)(file.read_text()))


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize("gpus", [(), (80 * GIB,), (80 * GIB, 80 * GIB)])
def test_the_committed_repository_is_clean_on_every_machine(server: Installation, gpus: tuple[int, ...]) -> None:
    assert check_repository(find_repository(None), Machine(gpus, 16 * GIB, server)) == []


@pytest.mark.parametrize("mistake", MACHINE, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found_at_its_line(repository: Path, server: Installation, mistake: Mistake) -> None:
    text = mistake.make(repository / mistake.model)
    assert check_repository(repository) == [], "the repository by itself is fine"
    found = only(check_repository(repository, Machine((), 16 * GIB, server)))
    assert (found.rule, found.severity) == (mistake.says.rule, "error")
    assert mistake.says.at in text.splitlines()[found.line - 1]
    assert mistake.says.fix in found.fix


def test_gpu_ids(repository: Path, server: Installation) -> None:
    edit(repository, "dit", "kind: KIND_AUTO", "kind: KIND_GPU gpus: [ 0, 2 ]")
    two = Machine((80 * GIB,) * 2, 16 * GIB, server)
    found = only(check_repository(repository, two))
    assert (found.rule, found.message) == ("gpu", "GPU 2 does not exist; there are 2 GPUs here")
    assert "from 0 to 1" in found.fix
    assert check_repository(repository, Machine((80 * GIB,) * 3, 16 * GIB, server)) == []


def test_a_newer_server_knows_newer_fields(repository: Path, server: Installation) -> None:
    edit(repository, ENSEMBLE, "ensemble_scheduling {", "ensemble_scheduling {\n  max_inflight_requests: 8")
    ngc = Installation(server.binary, server.backends, None)
    assert check_repository(repository, Machine((), 16 * GIB, ngc)) == []


def test_no_stub_for_this_python(repository: Path, server: Installation) -> None:
    assert server.stubs is not None
    shutil.move(server.stubs / f"3.{sys.version_info.minor}", server.stubs / "3.6")
    found = only(check_repository(repository, Machine((), 16 * GIB, server)))
    assert (found.rule, found.severity, found.file) == ("stub", "error", repository)
    assert "it has 3.6" in found.message


def test_no_server_is_a_warning(repository: Path) -> None:
    error = ServeError("No tritonserver.", "Install one.")
    found = only(check_repository(repository, Machine((), 16 * GIB, None, error)))
    assert (found.severity, found.message, found.fix) == ("warning", "No tritonserver.", "Install one.")


class TestMemory:
    def test_a_budget_that_cannot_fit(self, repository: Path, server: Installation) -> None:
        edit(
            repository,
            "dit",
            'key: "token_budget" value { string_value: "auto"',
            'key: "token_budget" value { string_value: "4194304"',
        )
        assert check_repository(repository, Machine((80 * GIB,), 16 * GIB, server)) == []
        found = only(check_repository(repository, Machine((4 * GIB,), 16 * GIB, server)))
        assert (found.rule, found.severity) == ("memory", "warning")
        assert found.file == repository / "dit" / "config.pbtxt"
        assert "GPU 0, which has 4.0 GiB" in found.message
        # Six activations of 2 bytes a token and channel, and hardly any weights.
        channels = json.loads((_embedded() / "transformer" / "config.json").read_text())
        width = channels["num_attention_heads"] * channels["attention_head_dim"]
        needed = float(found.message.partition("at least ")[2].partition(" GiB")[0])
        assert needed == pytest.approx(4194304 * 6 * 2 * width / GIB, abs=0.2)

    def test_weights_count_once_an_instance(self, repository: Path, server: Installation) -> None:
        weights = sum(file.stat().st_size for file in _embedded().rglob("*.safetensors"))
        edit(repository, "dit", "kind: KIND_AUTO", "kind: KIND_AUTO count: 400")
        found = only(check_repository(repository, Machine((4 * GIB,), 16 * GIB, server)))
        assert found.rule == "memory"
        assert weights < 4 * GIB
        assert check_repository(repository, Machine((0,), 16 * GIB, server)) == [], "0 is a memory that is not known"


class TestFamilies:
    def test_a_family_that_ditpack_does_not_know(self, repository: Path) -> None:
        file = repository / ENSEMBLE / "config.pbtxt"
        text = file.read_text()
        if 'key: "family"' in text:
            file.write_text(text.replace('"QwenImagePipeline"', '"QwenImagPipeline"'))
        else:
            file.write_text(append('parameters { key: "family" value { string_value: "QwenImagPipeline" } }')(text))
        found = only(check_repository(repository))
        assert (found.rule, found.fix) == ("family", "Did you mean 'QwenImagePipeline'?")


def test_what_this_machine_is() -> None:
    machine = this_machine(gpus=2, gpu_gib=80)
    assert machine.gpus == (80 * GIB, 80 * GIB)
    assert machine.ram > GIB // 2
    assert len(gpu_memory()) == len(this_machine().gpus)
    missing = this_machine("/no/such/tritonserver")
    assert missing.server is None
    assert missing.server_error is not None


def _embedded() -> Path:
    from ditpack.models.checkpoint import EMBEDDED

    return EMBEDDED
