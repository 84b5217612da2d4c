"""An ensemble's wiring, as Triton will judge it: names, producers and consumers, data types and shapes.

Triton stops at its first complaint and mostly names the ensemble alone; here each complaint stands at the line to edit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc.model_config_pb2 import DataType

from ditpack.tritonserver.check.findings import Finding, did_you_mean
from ditpack.tritonserver.check.model_rules import duplicate_keys
from ditpack.tritonserver.check.positions import Node
from ditpack.tritonserver.check.repository import Model, Repository


@dataclass(frozen=True)
class _End:
    """One end of an ensemble tensor's wire. ``declared`` is the ModelInput or ModelOutput there, if that is known."""

    owner: str  # the model, or the ensemble itself
    tensor: str
    declared: Any | None
    batched: bool
    node: Node  # where to edit
    step: int | None = None

    @property
    def data_type(self) -> int:
        return int(self.declared.data_type)  # type: ignore[union-attr]

    @property
    def dims(self) -> list[int]:
        assert self.declared is not None
        # An ensemble's own reshape counts, a step's does not: Triton looks at what the step's clients send.
        own = self.step is None and self.declared.HasField("reshape")
        return list(self.declared.reshape.shape if own else self.declared.dims)

    @property
    def full_dims(self) -> list[int]:
        return [-1, *self.dims] if self.batched else self.dims

    def __str__(self) -> str:
        return f"{self.owner}.{self.tensor}"


Ends = Mapping[str, list[_End]]  # by the ensemble tensor's name


def check_ensemble(repository: Repository, ensemble: Model) -> Iterator[Finding]:
    """Everything below, for one ensemble."""
    yield from _fields(ensemble)
    for index, step in enumerate(ensemble.config.ensemble_scheduling.step):
        node = ensemble.where.at("ensemble_scheduling", "step", index)
        yield from _step(repository, ensemble, step, node)
    yield from _wires(repository, ensemble)


def _fields(ensemble: Model) -> Iterator[Finding]:
    config, where = ensemble.config, ensemble.where
    if config.platform != "ensemble":
        message = f"has ensemble_scheduling, and its platform is {config.platform!r}"
        place = where.at("platform") if config.platform else where.at("ensemble_scheduling")
        yield ensemble.finding(place, "ensemble-field", message, 'Write platform: "ensemble".')
    if not config.ensemble_scheduling.step:
        message = "an ensemble needs at least one step"
        yield ensemble.finding(where.at("ensemble_scheduling"), "ensemble-field", message, "Add step [ { … } ].")
    for field in ("instance_group", "optimization", "model_warmup", "backend"):
        if where.fields.get(field):
            message = f"an ensemble cannot have {field}: it only passes tensors on"
            fix = f"Delete it here; {field} belongs in the configs of the step models."
            yield ensemble.finding(where.at(field), "ensemble-field", message, fix)


def _step(repository: Repository, ensemble: Model, step: Any, node: Node) -> Iterator[Finding]:
    for name in ("input_map", "output_map"):
        yield from duplicate_keys(ensemble, name, node.fields.get(name, []))
    if step.model_name not in repository.names:
        message = f"there is no model {step.model_name!r} in this repository"
        fix = did_you_mean(step.model_name, repository.names - {ensemble.name})
        yield ensemble.finding(node.at("model_name"), "step-model", message, fix)
        return
    model = repository.models.get(step.model_name)
    if model is None:
        return
    if model is ensemble:
        message = "an ensemble cannot be a step of itself"
        yield ensemble.finding(node.at("model_name"), "step-model", message, "Name another model.")
        return
    if step.model_version > 0 and step.model_version not in model.served_versions:
        message = f"{model.name} does not serve version {step.model_version}"
        fix = f"It serves {', '.join(map(str, model.served_versions)) or 'none'}; -1 means the newest."
        yield ensemble.finding(node.at("model_version"), "step-model", message, fix)
    largest, allowed = ensemble.config.max_batch_size, model.config.max_batch_size
    if 0 < allowed < largest:
        message = f"max_batch_size is {largest}, and the step {model.name} takes {allowed} at most"
        fix = f"Lower it to {allowed}, or raise that of {model.name}."
        yield ensemble.finding(ensemble.where.at("max_batch_size"), "batch-size", message, fix)
    yield from _maps(ensemble, model, step, node)


def _maps(ensemble: Model, model: Model, step: Any, node: Node) -> Iterator[Finding]:
    inputs = {tensor.name: tensor for tensor in model.config.input}
    outputs = {tensor.name for tensor in model.config.output}
    # A config may leave its tensors out where the backend can complete them; then nothing is known about them.
    wrong = False
    for name, known in (("input_map", set(inputs)), ("output_map", outputs)):
        mapped = getattr(step, name)
        for key in mapped:
            if known and key not in known and "" not in known:
                wrong = True
                message = (
                    f"{model.name} has no {name.partition('_')[0]} {key!r}; in a map, key is the step's own tensor"
                )
                fix = did_you_mean(key, known - set(mapped) or known)
                yield ensemble.finding(node.entry(name, key).at("key"), "map-key", message, fix)
    for name, tensor in inputs.items():
        if name not in step.input_map and not tensor.optional and not wrong:  # else it is the wrong key that is meant
            message = f"the input {name!r} of {model.name} is not mapped to anything"
            fix = f'Add input_map {{ key: "{name}" value: "…" }} to this step.'
            yield ensemble.finding(node.at("model_name"), "unmapped-input", message, fix)


def _wires(repository: Repository, ensemble: Model) -> Iterator[Finding]:
    config, where = ensemble.config, ensemble.where
    producers: dict[str, list[_End]] = defaultdict(list)
    consumers: dict[str, list[_End]] = defaultdict(list)
    batched = config.max_batch_size > 0
    for index, tensor in enumerate(config.input):
        node = where.at("input", index)
        producers[tensor.name].append(_End(ensemble.name, tensor.name, tensor, batched, node))
    for number, step in enumerate(config.ensemble_scheduling.step):
        model = repository.models.get(step.model_name)
        many = model is not None and model.config.max_batch_size > 0
        for name, declared, ends in (("input_map", "input", consumers), ("output_map", "output", producers)):
            tensors = {t.name: t for t in getattr(model.config, declared)} if model else {}
            for key, value in getattr(step, name).items():
                node = where.at("ensemble_scheduling", "step", number).entry(name, key)
                ends[value].append(_End(step.model_name, key, tensors.get(key), many, node.at("value"), number))
    for index, tensor in enumerate(config.output):
        node = where.at("output", index)
        consumers[tensor.name].append(_End(ensemble.name, tensor.name, tensor, batched, node))

    yield from _producers(ensemble, producers)
    if all(producers.get(name) for name in consumers):
        yield from _cycles(ensemble, producers, consumers)
    yield from _connections(ensemble, producers, consumers)
    for name, sinks in consumers.items():
        for source in producers.get(name, [])[:1]:
            for sink in sinks:
                yield from _compare(ensemble, name, source, sink)


def _producers(ensemble: Model, producers: Ends) -> Iterator[Finding]:
    for name, ends in producers.items():
        for end in ends[1:]:
            first = "an input of the ensemble" if ends[0].step is None else f"already written by {ends[0]}"
            message = f"{end} writes {name!r}, which is {first}; a tensor has one producer"
            fix = "Give this value another name, and use that name where this tensor is wanted."
            yield ensemble.finding(end.node, "two-producers", message, fix)


def _connections(ensemble: Model, producers: Ends, consumers: Ends) -> Iterator[Finding]:
    """Names that only one side knows. A misspelt one is reported where it is read, with what was probably meant."""
    unused = {name for name in producers if name and not consumers.get(name)}
    meant = set()
    for name, ends in consumers.items():
        if producers.get(name):
            continue
        written = {other for other, sources in producers.items() if sources[0].step is not None}
        fix = did_you_mean(name, unused or (written if ends[0].step is None else producers))
        meant |= {candidate for candidate in unused if fix == f"Did you mean {candidate!r}?"}
        for end in ends:
            if end.step is None:
                message = f"the output {name!r} is written by no step"
                yield ensemble.finding(end.node.at("name"), "unconnected", message, fix)
            else:
                message = f"{end} reads {name!r}, which neither a step writes nor the ensemble has as input"
                yield ensemble.finding(end.node, "unconnected", message, fix)
    for name in sorted(unused - meant):
        end = producers[name][0]
        if end.step is None:
            message = f"the input {name!r} is used by no step"
            yield ensemble.finding(end.node.at("name"), "unused", message, "Map it in a step, or delete it.")
        else:
            message = f"{end} writes {name!r}, which nothing reads"
            fix = "Delete this output_map (an output need not be mapped), or use the tensor."
            yield ensemble.finding(end.node, "unused", message, fix)


def _cycles(ensemble: Model, producers: Ends, consumers: Ends) -> Iterator[Finding]:
    """Steps that wait for each other; the order in which they are written does not matter to Triton."""
    steps = ensemble.config.ensemble_scheduling.step
    waits = {(end.step, producers[name][0].step) for name, ends in consumers.items() for end in ends}
    edges = {(step, source) for step, source in waits if step is not None and source is not None}
    while True:  # what waits for nothing, or is waited for by nothing, is in no circle
        waiting, waited_for = {step for step, _ in edges}, {source for _, source in edges}
        inner = {edge for edge in edges if edge[0] in waited_for and edge[1] in waiting}
        if inner == edges:
            break
        edges = inner
    if edges:
        circle = sorted({step for step, _ in edges})
        names = ", ".join(steps[step].model_name for step in circle)
        message = f"{names} {'waits for itself' if len(circle) == 1 else 'wait for each other'}"
        node = ensemble.where.at("ensemble_scheduling", "step", circle[0])
        yield ensemble.finding(node, "cycle", message, "Break the circle: one of its steps must not read from it.")


def _compare(ensemble: Model, name: str, source: _End, sink: _End) -> Iterator[Finding]:
    if source.declared is None or sink.declared is None or not (source.data_type and sink.data_type):
        return
    # The ensemble's own declaration is the one to edit; between two steps, the wire.
    own = next((end for end in (sink, source) if end.step is None), None)
    if source.data_type != sink.data_type:
        made, taken = DataType.Name(source.data_type), DataType.Name(sink.data_type)
        message = f"{name!r} is {made} in {source} and {taken} in {sink}"
        if own is None:
            fix = f"Map another tensor here, or change the type in one of the two models' {_CONFIGS}."
            yield ensemble.finding(sink.node, "data-type", message, fix)
        else:
            fix = f"Write data_type: {taken if own is source else made} here."
            yield ensemble.finding(own.node.at("data_type"), "data-type", message, fix)
    elif not (_fits(source.dims, sink.dims) or _fits(source.full_dims, sink.full_dims)):
        message = f"{name!r} is {source.dims} in {source} and {sink.dims} in {sink}"
        if own is None:
            fix = f"Map another tensor here, or make the dims in the two models' {_CONFIGS} agree (-1 is any size)."
            yield ensemble.finding(sink.node, "shape", message, fix)
        else:
            other = sink if own is source else source
            yield ensemble.finding(own.node.at("dims"), "shape", message, f"Write dims: {other.dims} here.")
    elif source.step is None and sink.step is not None and source.declared.optional and not sink.declared.optional:
        message = f"the input {name!r} is optional, and {sink} is not: a request without it gets stuck there"
        fix = "Delete optional: true here, or make the step's input optional."
        yield ensemble.finding(source.node.at("optional"), "optional", message, fix, "warning")


_CONFIGS = "config.pbtxt"


def _fits(one: Sequence[int], other: Sequence[int]) -> bool:
    """Triton's CompareDimsWithWildcard: as many dimensions, each equal or -1 on either side."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))
