"""``ditpack check``: what is wrong with a model repository, found without starting a server."""

from __future__ import annotations

from pathlib import Path

from ditpack.tritonserver.check.ditpack_rules import (
    check_agreement,
    check_families,
    check_kinds,
    check_parameters,
    open_checkpoints,
    read_settings,
    served_models,
)
from ditpack.tritonserver.check.ensemble_rules import check_ensemble
from ditpack.tritonserver.check.findings import Finding
from ditpack.tritonserver.check.machine import Machine, this_machine
from ditpack.tritonserver.check.machine_rules import check_devices, check_machine, check_memory
from ditpack.tritonserver.check.model_rules import check_model
from ditpack.tritonserver.check.python_rules import check_python
from ditpack.tritonserver.check.repository import read_repository

__all__ = ["Finding", "Machine", "check_repository", "this_machine"]


def check_repository(
    path: Path, machine: Machine | None = None, checkpoint: str | None = None, weights: str = "auto"
) -> list[Finding]:
    """All findings about the repository at ``path``, by file and line.

    Without ``machine`` only the repository itself is looked at; with one, the checkpoints too, and whether the machine
    can run it all. ``checkpoint`` and ``weights`` are what ``ditpack serve`` is given; see ``open_checkpoint``.
    """
    repository, findings = read_repository(path)
    settings = {}
    for name, model in repository.models.items():
        findings += check_model(model)
        findings += check_python(model)
        read = read_settings(model)
        if read is not None:
            settings[name] = read
            findings += check_parameters(read)
            findings += check_kinds(read)
    for ensemble in repository.ensembles:
        findings += check_ensemble(repository, ensemble)
    findings += check_agreement(repository, settings)
    if machine is not None:
        checkpoints, missing = open_checkpoints(settings, checkpoint, weights)
        findings += missing
        findings += check_families(repository, settings, checkpoints)
        findings += check_machine(repository, machine)
        findings += check_devices(settings, machine)
        served = {name: settings[name] for name in served_models(repository, settings, checkpoints)}
        findings += check_memory(served, checkpoints, machine)
    return sorted(set(findings), key=lambda found: (str(found.file), found.line, found.column, found.message))
