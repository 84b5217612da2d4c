"""The model repository that is served when none is named, and what is in one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

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
    """All models in it, in order."""
    return sorted(config.parent.name for config in repository.glob("*/config.pbtxt"))


def models_for(repository: Path, family: str) -> list[str]:
    """The models to load for a checkpoint of ``family``, in order.

    An ensemble may name the families it serves, with spaces between them, in its parameter ``family``. Ensembles of
    other families are left out, and with them the models that only they use. Everything else is loaded.

    Raises:
        ServeError: nothing is left.
    """
    configs = {name: _read(repository / name / "config.pbtxt") for name in model_names(repository)}
    families = {name: config.parameters["family"].string_value.split() for name, config in configs.items()}
    others = {name for name in configs if families[name] and family not in families[name]}

    def steps(ensembles: set[str]) -> set[str]:
        return {step.model_name for name in ensembles for step in configs[name].ensemble_scheduling.step}

    models = sorted(set(configs) - others - (steps(others) - steps(set(configs) - others)))
    if not models:
        raise ServeError(
            f"{repository} holds no model for a {family}.",
            f"Its ensembles serve {', '.join(sorted(set(chain(*families.values()))))}; name another --checkpoint.",
        )
    return models


def _read(config: Path) -> Any:
    """The model's config; an empty one when it does not parse, which Triton reports better, with line and column."""
    message = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(config.read_text("utf-8", "replace"), message)
    except text_format.ParseError:
        return model_config_pb2.ModelConfig()
    return message


def imports_ditpack(repository: Path) -> bool:
    """Whether any model.py in it names ditpack: a repository of somebody else's models may do without."""
    return any("ditpack" in file.read_text("utf-8", "replace") for file in repository.glob("*/*/model.py"))
