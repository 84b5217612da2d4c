"""ditpack's own parameters: known, in range, and the same where one ensemble's models must agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ditpack.models.checkpoint import FAMILIES, Checkpoint, CheckpointError, open_checkpoint
from ditpack.tritonserver.check.doors import settings_kind
from ditpack.tritonserver.check.findings import Finding, did_you_mean
from ditpack.tritonserver.check.positions import Node
from ditpack.tritonserver.check.repository import Model, Repository
from ditpack.tritonserver.parameters import parse_parameter

_SHARED = "max_pixels"  # a request that the first model allows and a later one refuses has cost its work already
_FAMILY = "family"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A ditpack model's parameters: the dataclass ``kind`` and the values that could be read, defaults filled in."""

    model: Model
    kind: type[Any]
    values: Mapping[str, Any]

    def where(self, name: str) -> Node:
        """Where parameter ``name`` is set; the file's first line when it is left to its default."""
        return self.model.where.entry("parameters", name).at("value", "string_value")


def read_settings(model: Model) -> Settings | None:
    """None for a model that is not one of ditpack's. What cannot be read keeps its default."""
    kind = settings_kind(model)
    if kind is None:
        return None
    values = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, entry in model.config.parameters.items():
        try:
            values[name] = parse_parameter(kind, name, entry.string_value)
        except ValueError:
            continue  # check_parameters says so
    return Settings(model, kind, values)


def check_parameters(settings: Settings) -> Iterator[Finding]:
    """Every parameter as the model itself will read it."""
    known = [field.name for field in dataclasses.fields(settings.kind)]
    for name, entry in settings.model.config.parameters.items():
        node = settings.model.where.entry("parameters", name)
        if name not in known:
            message = f"{settings.model.name} has no parameter {name!r}"
            yield settings.model.finding(node.at("key"), "parameter", message, did_you_mean(name, known))
            continue
        try:
            parse_parameter(settings.kind, name, entry.string_value)
        except ValueError as error:
            message = f"parameter {name} = {entry.string_value!r}"
            fix = f"It {error}."
            yield settings.model.finding(node.at("value", "string_value"), "parameter", message, fix)


def steps_of(ensemble: Model, settings: Mapping[str, Settings]) -> list[Settings]:
    """The settings of an ensemble's ditpack models, each once, in the order of its steps."""
    names = dict.fromkeys(step.model_name for step in ensemble.config.ensemble_scheduling.step)
    return [settings[name] for name in names if name in settings]


def check_agreement(repository: Repository, settings: Mapping[str, Settings]) -> Iterator[Finding]:
    """What the models of one ensemble must agree on."""
    for ensemble in repository.ensembles:
        family = ensemble.config.parameters.get(_FAMILY)
        if family is not None and family.string_value not in FAMILIES:
            node = ensemble.where.entry("parameters", _FAMILY).at("value", "string_value")
            message = f"ditpack knows no model family {family.string_value!r}"
            yield ensemble.finding(node, "family", message, did_you_mean(family.string_value, FAMILIES))
        limited = [step for step in steps_of(ensemble, settings) if _SHARED in step.values]
        for step in limited[1:]:
            first, value = limited[0].values[_SHARED], step.values[_SHARED]
            if value != first:
                message = f"{_SHARED} is {value} here and {first} in {limited[0].model.name}, of one {ensemble.name}"
                fix = f"Set it to {first} in both, so that no image is refused halfway."
                yield step.model.finding(step.where(_SHARED), "disagreement", message, fix, "warning")


def open_checkpoints(
    settings: Mapping[str, Settings], default: str | None
) -> tuple[dict[str, Checkpoint], list[Finding]]:
    """Model name → its checkpoint, and a finding for each one that cannot be served. ``default`` replaces "auto"."""
    opened: dict[str, Checkpoint | CheckpointError] = {}
    checkpoints: dict[str, Checkpoint] = {}
    findings: list[Finding] = []
    for name, step in settings.items():
        location = step.values.get("checkpoint")
        if location is None:
            continue
        location = default or "auto" if location == "auto" else location
        if location not in opened:
            try:
                opened[location] = open_checkpoint(location)
            except CheckpointError as error:
                opened[location] = error
        result = opened[location]
        if isinstance(result, Checkpoint):
            checkpoints[name] = result
        elif location not in ("auto", default) or not findings:  # the common one is reported once
            fix = "Name a directory in diffusers' layout, or embedded for the small model inside ditpack."
            findings.append(step.model.finding(step.where("checkpoint"), "checkpoint", str(result), fix))
    return checkpoints, findings


def check_families(
    repository: Repository, settings: Mapping[str, Settings], checkpoints: Mapping[str, Checkpoint]
) -> Iterator[Finding]:
    """One ensemble, one family: that of its parameter ``family``, or else of its first model's checkpoint."""
    served, others = False, []
    for ensemble in repository.ensembles:
        steps = [step for step in steps_of(ensemble, settings) if step.model.name in checkpoints]
        if not steps:
            continue
        stated = ensemble.config.parameters.get(_FAMILY)
        family = stated.string_value if stated is not None else checkpoints[steps[0].model.name].family
        if stated is not None and all(
            step.values["checkpoint"] == "auto" and checkpoints[step.model.name].family != family for step in steps
        ):
            others.append((ensemble, family, checkpoints[steps[0].model.name]))
            continue  # `ditpack serve` leaves it out
        served = True
        for step in steps:
            checkpoint = checkpoints[step.model.name]
            if checkpoint.family != family:
                message = f"{checkpoint.path} is a {checkpoint.family}, and {ensemble.name} serves a {family}"
                fix = f"Name a checkpoint of the family {family}."
                yield step.model.finding(step.where("checkpoint"), "family", message, fix)
    if others and not served:
        ensemble, _, checkpoint = others[0]
        node = ensemble.where.entry("parameters", _FAMILY).at("value", "string_value")
        message = f"no ensemble here serves {checkpoint.path}, a {checkpoint.family}"
        fix = f"Name a checkpoint of the family {' or '.join(sorted({family for _, family, _ in others}))}."
        yield ensemble.finding(node, "family", message, fix)
