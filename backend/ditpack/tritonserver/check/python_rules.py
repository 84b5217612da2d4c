"""A Python model's file: whether it is there, compiles, and has the class that Triton looks for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ditpack.tritonserver.check.findings import Finding, did_you_mean
from ditpack.tritonserver.check.repository import Model

_CLASS = "TritonPythonModel"


def check_python(model: Model) -> Iterator[Finding]:
    """Look into the model.py of every version that will be served."""
    if model.backend != "python" or model.is_ensemble:
        return
    name = model.config.default_model_filename or "model.py"
    for version in model.served_versions:
        file = model.directory / str(version) / name
        if file.is_file():
            yield from _file(file)
            continue
        near = [entry.name for entry in file.parent.iterdir() if entry.suffix == ".py"]
        fix = f"Put it there. {did_you_mean(name, near)}" if near else "Put it there."
        message = f"{model.name}/{version}/{name} is missing; the python backend runs it"
        yield model.finding(model.where.at("default_model_filename"), "model-file", message, fix)


def _file(file: Path) -> Iterator[Finding]:
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        message = f"is no Python: {error.msg}"
        fix = f"Correct it: {(error.text or '').strip()}" if error.text else "Correct it."
        yield Finding(file, error.lineno or 0, error.offset or 0, "error", "python-syntax", message, fix)
        return
    except (OSError, ValueError) as error:
        yield Finding(file, 0, 0, "error", "python-syntax", f"cannot be read: {error}", "Replace the file.")
        return
    names: dict[str, ast.stmt] = {}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            names[statement.name] = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: statement for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            names |= {target.id: statement for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.If | ast.Try):
            return  # what it defines depends on the machine
    if "*" in names:
        return
    found = names.get(_CLASS)
    if found is None:
        message = f"has no class {_CLASS}, which Triton instantiates"
        classes = [name for name, statement in names.items() if isinstance(statement, ast.ClassDef)]
        fix = f"Name it so. {did_you_mean(_CLASS, classes)}" if classes else "Write one with initialize and execute."
        yield Finding(file, 1, 1, "error", "python-class", message, fix)
    elif isinstance(found, ast.ClassDef) and not found.bases:
        methods = {entry.name for entry in found.body if isinstance(entry, ast.FunctionDef | ast.AsyncFunctionDef)}
        if "execute" not in methods:
            message = f"{_CLASS} has no method execute(self, requests)"
            fix = did_you_mean("execute", methods) if methods else "Write it."
            yield Finding(file, found.lineno, found.col_offset + 1, "error", "python-class", message, fix)
