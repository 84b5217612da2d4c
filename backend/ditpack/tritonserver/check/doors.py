"""Which of ditpack's settings a model takes, read from its model.py and the door behind it without importing either."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ditpack.tritonserver import parameters
from ditpack.tritonserver.check.repository import Model

_PACKAGE = "ditpack.tritonserver"


def settings_kind(model: Model) -> type[Any] | None:
    """The dataclass of ``parameters`` that the door behind ``model`` reads; None for a model that is not ditpack's.

    A door says so itself, as ``instance.settings(DitSettings)``. Doors import Triton's module, so they are only parsed.
    """
    for version in model.served_versions[-1:]:
        for module in _imports(model.directory / str(version) / "model.py"):
            spec = importlib.util.find_spec(module)
            names = _settings_names(Path(spec.origin)) if spec and spec.origin else set()
            if len(names) == 1:
                return getattr(parameters, names.pop(), None)
    return None


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{_PACKAGE}."):
            yield node.module or ""


def _settings_names(door: Path) -> set[str]:
    return {
        argument.id
        for node in ast.walk(_tree(door))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "settings"
        for argument in node.args
        if isinstance(argument, ast.Name)
    }
