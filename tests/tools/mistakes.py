"""Mistakes people make in a model repository: each as an edit of ditpack's own, what the linter must say about it, and
what tritonserver says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ditpack.tritonserver.launch.repository import find_repository

Edit = Callable[[str], str]
ENSEMBLE = "qwen_image"


@dataclass(frozen=True)
class Says:
    """A finding: its rule, the line that it must be at (by what is first found on it), and what its fix contains."""

    rule: str
    at: str
    fix: str
    severity: str = "error"


@dataclass(frozen=True)
class Mistake:
    """``edit`` of ``file`` in ``model``'s directory. ``refused`` is in tritonserver's answer when the model is loaded
    then; None where Triton loads it all the same."""

    name: str
    model: str
    edit: Edit
    says: Says
    refused: str | None
    file: str = "config.pbtxt"

    def make(self, directory: Path) -> str:
        """Edit the model in ``directory``, a copy of the real one; returns the file's new text."""
        file = directory / self.file
        file.write_text(self.edit(file.read_text()))
        return file.read_text()


def copied_repository(directory: Path) -> Path:
    """A copy of ditpack's own model repository."""
    return Path(shutil.copytree(find_repository(None), directory, ignore=shutil.ignore_patterns("__pycache__")))


def swap(old: str, new: str) -> Edit:
    """Replace the only occurrence of ``old``."""

    def edit(text: str) -> str:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the file"
        return text.replace(old, new)

    return edit


def swap_first(old: str, new: str) -> Edit:
    def edit(text: str) -> str:
        assert old in text, old
        return text.replace(old, new, 1)

    return edit


def append(addition: str) -> Edit:
    return lambda text: f"{text}\n{addition}\n"


def chain(*edits: Edit) -> Edit:
    def edit(text: str) -> str:
        for one in edits:
            text = one(text)
        return text

    return edit


def add_step(model: str, inputs: str, outputs: str) -> Edit:
    """A further first step; the maps as "KEY value"."""
    (read, source), (write, target) = inputs.split(), outputs.split()
    step = (
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "{read}" value: "{source}" }} '
        f'output_map {{ key: "{write}" value: "{target}" }} }}'
    )
    return swap("  step [", f"  step [\n    {step},")


def add_input(declared: str) -> Edit:
    return swap_first("input [", f"input [\n  {{ {declared} }},")


def add_output(declared: str) -> Edit:
    return swap_first("output [", f"output [\n  {{ {declared} }},")
