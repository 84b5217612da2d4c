"""A model repository as the linter sees it: each model's config with the place of every field in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ditpack.tritonserver.check.findings import Finding, Severity
from ditpack.tritonserver.check.parsing import parse
from ditpack.tritonserver.check.positions import Node

CONFIG = "config.pbtxt"


@dataclass(frozen=True)
class Model:
    """One model directory. ``name`` is the directory's, which is the only one that Triton accepts.

    ``config`` is an ``inference.ModelConfig``; ``where`` holds the position of all that is written in its file.
    """

    name: str
    directory: Path
    config: Any
    where: Node

    @property
    def file(self) -> Path:
        return self.directory / CONFIG

    @property
    def is_ensemble(self) -> bool:
        return self.config.platform == "ensemble" or self.config.HasField("ensemble_scheduling")

    @property
    def backend(self) -> str:
        """What runs it: as configured, or ``python`` where Triton completes that from a model.py."""
        if self.config.backend or self.config.platform:
            return str(self.config.backend)
        return "python" if any(self.directory.glob("*/model.py")) else ""

    @cached_property
    def versions(self) -> list[int]:
        """The version directories that there are, in order."""
        return sorted(int(path.name) for path in self.directory.iterdir() if path.is_dir() and path.name.isdecimal())

    @property
    def served_versions(self) -> list[int]:
        """Those of them that the version policy loads."""
        policy = self.config.version_policy
        if policy.HasField("all"):
            return self.versions
        if policy.HasField("specific"):
            return [version for version in self.versions if version in policy.specific.versions]
        return self.versions[-(policy.latest.num_versions or 1) :]

    def finding(self, node: Node, rule: str, message: str, fix: str, severity: Severity = "error") -> Finding:
        return Finding(self.file, node.line, node.column, severity, rule, message, fix)


@dataclass(frozen=True)
class Repository:
    """``unreadable`` names the models whose config does not parse: nothing more can be said about them."""

    path: Path
    models: dict[str, Model]
    unreadable: frozenset[str]

    @property
    def names(self) -> set[str]:
        return {*self.models, *self.unreadable}

    @property
    def ensembles(self) -> Iterator[Model]:
        return (model for model in self.models.values() if model.is_ensemble)


def read_repository(path: Path) -> tuple[Repository, list[Finding]]:
    """The models below ``path``, and what was wrong with their files before any rule could look at them."""
    findings: list[Finding] = []
    models: dict[str, Model] = {}
    unreadable = set()
    for directory in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        file = directory / CONFIG
        if not file.is_file():
            findings += _without_config(directory)
            continue
        config, where, problems = parse(file)
        findings += problems
        if config is None or where is None:
            unreadable.add(directory.name)
        else:
            models[directory.name] = Model(directory.name, directory, config, where)
    return Repository(path, models, frozenset(unreadable)), findings


def _without_config(directory: Path) -> Iterator[Finding]:
    if directory.name.startswith((".", "__")):
        fix = "Remove it, or keep it outside of the repository."
    else:
        near = sorted(entry.name for entry in directory.iterdir() if entry.is_file() and "config" in entry.name)
        fix = f"Rename {near[0]}." if near else "Add one, or keep what is no model outside of the repository."
    message = f"directory {directory.name!r} has no {CONFIG}; Triton takes every directory here for a model"
    yield Finding(directory, 0, 0, "warning", "no-config", message, fix)
