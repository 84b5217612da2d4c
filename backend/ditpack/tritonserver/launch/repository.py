"""The model repository that is served when none is named, and what is in one."""

from __future__ import annotations

from pathlib import Path

import ditpack
from ditpack.tritonserver.launch.serve_error import ServeError


def find_repository(explicit: Path | None) -> Path:
    """``explicit``, else the one inside the installed package, else the checkout's.

    Raises:
        ServeError: when it is no directory or holds no models.
    """
    package = Path(ditpack.__file__).resolve().parent
    candidates = [explicit] if explicit else [package / "model_repository", package.parents[1] / "model_repository"]
    repository = next((path for path in candidates if path.is_dir()), None)
    if repository is None:
        raise ServeError(
            f"No model repository at {' or '.join(map(str, candidates))}.",
            "Name the directory that Triton shall load with --model-repository.",
        )
    if not model_names(repository):
        raise ServeError(
            f"{repository} holds no models: no directory in it has a config.pbtxt.",
            "--model-repository is the directory that contains the models' directories.",
        )
    return repository.resolve()


def model_names(repository: Path) -> list[str]:
    """The models that Triton loads from it, in order."""
    return sorted(config.parent.name for config in repository.glob("*/config.pbtxt"))


def imports_ditpack(repository: Path) -> bool:
    """Whether any model.py in it names ditpack: a repository of somebody else's models may do without."""
    return any("ditpack" in file.read_text("utf-8", "replace") for file in repository.glob("*/*/model.py"))
