"""ditpack's own parameters: known, in range, and the same where one ensemble's models must agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ditpack.models.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ditpack.models.families import FAMILIES
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


def check_kinds(settings: Settings) -> Iterator[Finding]:
    """KIND_MODEL and dit's parameter ``devices`` go together, and other models have neither."""
    from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

    several = settings.values.get("devices")
    for index, group in enumerate(settings.model.config.instance_group):
        kind = ModelInstanceGroup.Kind.Name(group.kind)
        node = settings.model.where.at("instance_group", index)
        if kind == "KIND_MODEL" and not several:
            message = f"{settings.model.name} is of KIND_MODEL and names no devices"
            fix = "Use KIND_AUTO"
            fix += ", or name two or more in the parameter devices." if several is not None else "."
            yield settings.model.finding(node.at("kind"), "instance-kind", message, fix)
        elif kind != "KIND_MODEL" and several:
            message = f"the parameter devices is set, and the instance is of {kind}"
            yield settings.model.finding(
                node.at("kind"), "instance-kind", message, "Use KIND_MODEL, or set devices to none."
            )


def steps_of(ensemble: Model, settings: Mapping[str, Settings]) -> list[Settings]:
    """The settings of an ensemble's ditpack models, each once, in the order of its steps."""
    names = dict.fromkeys(step.model_name for step in ensemble.config.ensemble_scheduling.step)
    return [settings[name] for name in names if name in settings]


def check_agreement(repository: Repository, settings: Mapping[str, Settings]) -> Iterator[Finding]:
    """What the models of one ensemble must agree on."""
    for ensemble in repository.ensembles:
        for family in _stated_families(ensemble):
            if family not in FAMILIES:
                node = ensemble.where.entry("parameters", _FAMILY).at("value", "string_value")
                message = f"ditpack knows no model family {family!r}"
                yield ensemble.finding(node, "family", message, did_you_mean(family, FAMILIES))
        limited = [step for step in steps_of(ensemble, settings) if _SHARED in step.values]
        for step in limited[1:]:
            first, value = limited[0].values[_SHARED], step.values[_SHARED]
            if value != first:
                message = f"{_SHARED} is {value} here and {first} in {limited[0].model.name}, of one {ensemble.name}"
                fix = f"Set it to {first} in both, so that no image is refused halfway."
                yield step.model.finding(step.where(_SHARED), "disagreement", message, fix, "warning")


def open_checkpoints(
    settings: Mapping[str, Settings], default: str | None, weights: str
) -> tuple[dict[str, Checkpoint], list[Finding]]:
    """Model name → its checkpoint, and a finding for each one that cannot be served.

    ``default`` and ``weights`` stand for the values "auto" of the parameters ``checkpoint`` and ``weights``.
    """
    opened: dict[tuple[str, str], Checkpoint | CheckpointError] = {}
    checkpoints: dict[str, Checkpoint] = {}
    findings: list[Finding] = []
    for name, step in settings.items():
        location, wanted = step.values.get("checkpoint"), step.values.get("weights", "auto")
        if location is None:
            continue
        key = (default or "auto" if location == "auto" else location, weights if wanted == "auto" else wanted)
        first = key not in opened
        if first:
            try:
                opened[key] = open_checkpoint(*key)
            except CheckpointError as error:
                opened[key] = error
        result = opened[key]
        if isinstance(result, Checkpoint):
            checkpoints[name] = result
        elif first:  # the models that share it share its fault
            fix = "Name a directory in diffusers' layout, or embedded for the small model inside ditpack."
            findings.append(step.model.finding(step.where("checkpoint"), "checkpoint", str(result), fix))
    return checkpoints, findings


def served_models(
    repository: Repository, settings: Mapping[str, Settings], checkpoints: Mapping[str, Checkpoint]
) -> set[str]:
    """The ditpack models that ``ditpack serve`` loads: all but those of ensembles that it leaves out alone."""
    used: set[str] = set()
    left_out: set[str] = set()
    for ensemble in repository.ensembles:
        names = {step.model.name for step in steps_of(ensemble, settings)}
        (left_out if _other_family(ensemble, settings, checkpoints) else used).update(names)
    return set(settings) - (left_out - used)


def _stated_families(ensemble: Model) -> list[str]:
    stated = ensemble.config.parameters.get(_FAMILY)
    return stated.string_value.split() if stated is not None else []


def _other_family(ensemble: Model, settings: Mapping[str, Settings], checkpoints: Mapping[str, Checkpoint]) -> bool:
    """Whether the ensemble states its families, and the checkpoint that its models are left to is of another."""
    stated = _stated_families(ensemble)
    steps = [step for step in steps_of(ensemble, settings) if step.model.name in checkpoints]
    left_to = [checkpoints[step.model.name].family for step in steps if step.values["checkpoint"] == "auto"]
    return bool(stated) and bool(left_to) and not set(left_to) & set(stated)


def check_families(
    repository: Repository, settings: Mapping[str, Settings], checkpoints: Mapping[str, Checkpoint]
) -> Iterator[Finding]:
    """The checkpoints of one ensemble are of the families in its parameter ``family``, or else of the first's."""
    left_out = [ensemble for ensemble in repository.ensembles if _other_family(ensemble, settings, checkpoints)]
    served = False
    for ensemble in repository.ensembles:
        steps = [step for step in steps_of(ensemble, settings) if step.model.name in checkpoints]
        if not steps or ensemble in left_out:
            continue
        served = True
        families = _stated_families(ensemble) or [checkpoints[steps[0].model.name].family]
        for step in steps:
            checkpoint = checkpoints[step.model.name]
            if checkpoint.family not in families:
                names = " or ".join(families)
                message = f"{checkpoint.path} is a {checkpoint.family}, and {ensemble.name} serves a {names}"
                fix = f"Name a checkpoint of the family {names}."
                yield step.model.finding(step.where("checkpoint"), "family", message, fix)
    if left_out and not served:
        ensemble = left_out[0]
        checkpoint = checkpoints[steps_of(ensemble, settings)[0].model.name]
        node = ensemble.where.entry("parameters", _FAMILY).at("value", "string_value")
        message = f"no ensemble here serves {checkpoint.path}, a {checkpoint.family}"
        all_families = sorted({family for other in left_out for family in _stated_families(other)})
        fix = f"Name a checkpoint of the family {' or '.join(all_families)}."
        yield ensemble.finding(node, "family", message, fix)
