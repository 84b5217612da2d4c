"""``ditpack check`` against a machine: GPUs, memory, the tritonserver, checkpoints and their families."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from mistakes import ENSEMBLE, Mistake, copied_repository, swap
from mistakes_ensembles import MACHINE

from ditpack.models import checkpoint
from ditpack.models.checkpoint import EMBEDDED, Checkpoint
from ditpack.tritonserver.check import (
    Finding,
    Machine,
    check_repository,
    ditpack_rules,
    machine_rules,
    this_machine,
)
from ditpack.tritonserver.check.machine import gpu_memory
from ditpack.tritonserver.check.repository import read_repository
from ditpack.tritonserver.launch import ServeError
from ditpack.tritonserver.launch.find import Installation
from ditpack.tritonserver.launch.repository import find_repository, model_names

GIB = 2**30
CHECKPOINT = 'key: "checkpoint" value {{ string_value: "{}"'


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
    return Installation(tmp_path / "tritonserver", tmp_path / "backends", tmp_path / "stubs")


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


def test_gpu_ids_in_a_parameter(server: Installation) -> None:
    """A parameter that holds devices by torch's names, whatever it is called."""

    @dataclasses.dataclass(frozen=True)
    class Kind:
        devices: tuple[str, ...] = ("cuda:0", "cuda:5")

    (model,) = [m for m in read_repository(find_repository(None))[0].models.values() if m.name == "dit"]
    settings = ditpack_rules.Settings(model, Kind, {"devices": Kind.devices})
    found = only(list(machine_rules.check_devices({"dit": settings}, Machine((GIB, GIB), GIB, server))))
    assert found.message == "GPU 5 does not exist; there are 2 GPUs here"
    assert not list(machine_rules.check_devices({"dit": settings}, Machine((GIB,) * 6, GIB, server)))


def test_a_newer_server_knows_newer_fields(repository: Path, server: Installation) -> None:
    edit(repository, ENSEMBLE, "ensemble_scheduling {", "ensemble_scheduling {\n  max_inflight_requests: 8")
    ngc = Installation(server.binary, server.backends)
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
        channels = json.loads((EMBEDDED / "transformer" / "config.json").read_text())
        width = channels["num_attention_heads"] * channels["attention_head_dim"]
        needed = float(found.message.partition("at least ")[2].partition(" GiB")[0])
        assert needed == pytest.approx(4194304 * 6 * 2 * width / GIB, abs=0.2)

    def test_weights_count_once_an_instance(self, repository: Path, server: Installation) -> None:
        weights = sum(file.stat().st_size for file in EMBEDDED.rglob("*.safetensors"))
        edit(repository, "dit", "kind: KIND_AUTO", "kind: KIND_AUTO count: 400")
        found = only(check_repository(repository, Machine((4 * GIB,), 16 * GIB, server)))
        assert found.rule == "memory"
        assert weights < 4 * GIB
        assert check_repository(repository, Machine((0,), 16 * GIB, server)) == [], "0 is a memory that is not known"


class TestFamilies:
    """``other`` is a checkpoint of a family that no ensemble serves."""

    @pytest.fixture
    def other(self, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> str:
        def open_checkpoint(location: str, weights: str) -> Checkpoint:
            served = checkpoint.open_checkpoint(tiny_checkpoint)
            if location != "other":
                return served
            return dataclasses.replace(served, path=Path("/models/other"), family="OtherPipeline")

        monkeypatch.setattr(ditpack_rules, "open_checkpoint", open_checkpoint)
        return "other"

    @staticmethod
    def state(repository: Path, families: str) -> None:
        """Write the ensemble's parameter ``family``."""
        file = repository / ENSEMBLE / "config.pbtxt"
        text, count = re.subn(r'(key: "family" value { string_value: )"[^"]*"', rf'\g<1>"{families}"', file.read_text())
        assert count == 1
        file.write_text(text)

    def test_a_family_that_ditpack_does_not_know(self, repository: Path) -> None:
        self.state(repository, "QwenImagePipeline QwenImagPipelin")
        found = only(check_repository(repository))
        assert (found.rule, found.message) == ("family", "ditpack knows no model family 'QwenImagPipelin'")
        assert found.fix == "Did you mean 'QwenImagePipeline'?"

    def test_a_part_from_a_checkpoint_of_another_family(
        self, repository: Path, server: Installation, other: str
    ) -> None:
        self.state(repository, "QwenImagePipeline")
        edit(repository, "vae_decoder", 'key: "checkpoint" value { string_value: "auto"', CHECKPOINT.format(other))
        findings = check_repository(repository, Machine((), 16 * GIB, server))  # one for each ensemble that uses it
        assert {(found.rule, found.file.parent.name) for found in findings} == {("family", "vae_decoder")}
        message = "/models/other is a OtherPipeline, and qwen_image serves a QwenImagePipeline"
        assert message in [found.message for found in findings]

    def test_a_checkpoint_that_no_ensemble_serves(self, repository: Path, server: Installation, other: str) -> None:
        self.state(repository, "QwenImagePipeline")
        for name in model_names(repository):  # what other branches of the family tree there may be
            if name not in (ENSEMBLE, "prepare", "text_encoder", "dit", "vae_decoder"):
                shutil.rmtree(repository / name)
        found = only(check_repository(repository, Machine((), 16 * GIB, server), other))
        assert found.message == "no ensemble here serves /models/other, a OtherPipeline"
        assert found.fix == "Name a checkpoint of the family QwenImagePipeline."


def test_what_this_machine_is() -> None:
    machine = this_machine(gpus=2, gpu_gib=80)
    assert machine.gpus == (80 * GIB, 80 * GIB)
    assert machine.ram > GIB // 2
    assert len(gpu_memory()) == len(this_machine().gpus)
    missing = this_machine("/no/such/tritonserver")
    assert missing.server is None
    assert missing.server_error is not None
