"""What Triton asks of one model's config, whatever the model is; mostly its ValidateModelConfig."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ditpack.tritonserver.check.findings import Finding, did_you_mean
from ditpack.tritonserver.check.repository import Model

# Of Triton's own images. Another name may be somebody's own backend; only one that looks like a slip is an error.
BACKENDS = (
    *("python", "onnxruntime", "tensorrt", "pytorch", "pytorch_aoti", "openvino", "dali", "fil", "identity", "repeat"),
    *("square", "tensorflow", "tensorrtllm", "vllm"),
)
PLATFORMS = (
    *("ensemble", "tensorrt_plan", "onnxruntime_onnx", "pytorch_libtorch", "tensorflow_savedmodel"),
    *("tensorflow_graphdef", "torch_aoti"),
)


def check_model(model: Model) -> Iterator[Finding]:
    """Everything below, for one model."""
    yield from _name(model)
    yield from _backend(model)
    yield from _versions(model)
    yield from _tensors(model)
    yield from _batching(model)
    yield from _instances(model)
    yield from _warmup(model)
    yield from _cache(model)
    yield from duplicate_keys(model, "parameters", model.where.fields.get("parameters", []))


def _name(model: Model) -> Iterator[Finding]:
    name = model.config.name
    if name and name != model.name:
        message = f"the model is named {name!r} and its directory {model.name!r}; Triton wants one name"
        fix = f'Write name: "{model.name}", leave the line out, or rename the directory.'
        yield model.finding(model.where.at("name"), "name", message, fix)


def _backend(model: Model) -> Iterator[Finding]:
    config, where = model.config, model.where
    if model.is_ensemble:
        return
    if not config.backend and not config.platform:
        if model.backend == "python":
            message = "no backend is named; Triton guesses python because there is a model.py"
            yield model.finding(where, "backend", message, 'Write backend: "python".', "warning")
        return
    own = [*model.directory.glob("*.so"), *model.directory.glob("*/*.so")]
    if config.backend and config.backend not in BACKENDS and not own:
        guess = did_you_mean(config.backend, BACKENDS)
        if guess.startswith("Did"):
            message = f"there is no backend {config.backend!r}"
            yield model.finding(where.at("backend"), "backend", message, guess)
    if config.platform and not config.backend and config.platform not in PLATFORMS:
        message = f"there is no platform {config.platform!r}"
        yield model.finding(where.at("platform"), "backend", message, did_you_mean(config.platform, PLATFORMS))


def _versions(model: Model) -> Iterator[Finding]:
    if not model.versions:
        message = "there is no version directory; Triton needs one to load the model"
        fix = "Make the directory 1/ with model.py in it."
        if model.is_ensemble:
            fix = "Make the empty directory 1/, with a .gitkeep in it, since git drops empty directories."
        yield model.finding(model.where, "no-version", message, fix)
        return
    if not model.config.version_policy.HasField("specific"):
        return
    wanted = model.config.version_policy.specific.versions
    for index, version in enumerate(wanted):
        if version not in model.versions:
            node = model.where.at("version_policy", "specific", "versions", index)
            message = f"version {version} is asked for and has no directory"
            yield model.finding(node, "no-version", message, f"There are {', '.join(map(str, model.versions))}.")


def _tensors(model: Model) -> Iterator[Finding]:
    for kind in ("input", "output"):
        tensors = getattr(model.config, kind)
        counts = Counter(tensor.name for tensor in tensors)
        for index, tensor in enumerate(tensors):
            node = model.where.at(kind, index)
            if not tensor.name:
                yield model.finding(node, "tensor", f"an {kind} has no name", 'Write name: "…".')
                continue
            if counts[tensor.name] > 1:
                message = f"{kind} {tensor.name!r} is declared {counts[tensor.name]} times"
                yield model.finding(node.at("name"), "tensor", message, "Keep one of them.")
            if not tensor.data_type:
                yield model.finding(
                    node, "tensor", f"{kind} {tensor.name!r} has no data_type", "Write data_type: TYPE_…"
                )
            if not tensor.dims:
                message = f"{kind} {tensor.name!r} has no dims"
                fix = "Write dims: [ … ], without the batch dimension; -1 stands for any size."
                yield model.finding(node, "dims", message, fix)
            for place, size in enumerate(tensor.dims):
                if size < 1 and size != -1:
                    message = f"{kind} {tensor.name!r} has a dimension of {size}"
                    yield model.finding(node.at("dims", place), "dims", message, "Write a size from 1, or -1 for any.")
            if tensor.HasField("reshape") and not _same_size(tensor.dims, tensor.reshape.shape):
                message = f"{kind} {tensor.name!r}: reshape holds another number of elements than dims"
                yield model.finding(node.at("reshape"), "dims", message, "Make the products of the two equal.")


def _same_size(dims: Any, shape: Any) -> bool:
    """Triton's rule: the products between the variable dimensions agree; an empty shape stands for one element."""
    return _products(dims) == _products(shape)


def _products(dims: Any) -> list[int]:
    parts: list[list[int]] = [[]]
    for size in dims:
        if size == -1:
            parts.append([])
        else:
            parts[-1].append(size)
    return [math.prod(part) for part in parts]


def _batching(model: Model) -> Iterator[Finding]:
    config, where = model.config, model.where
    if config.max_batch_size < 0:
        message = f"max_batch_size is {config.max_batch_size}"
        yield model.finding(where.at("max_batch_size"), "batching", message, "0 means no batch dimension.")
    if config.HasField("dynamic_batching"):
        faults = [*_dynamic_batching(model), *_timeouts(model)]
        yield from faults or _hand_over(model)


def _dynamic_batching(model: Model) -> Iterator[Finding]:
    config = model.config
    batching, node = config.dynamic_batching, model.where.at("dynamic_batching")
    for index, size in enumerate(batching.preferred_batch_size):
        if not 0 < size <= config.max_batch_size:
            message = f"preferred_batch_size {size} is not in 1 … max_batch_size, which is {config.max_batch_size}"
            place = node.at("preferred_batch_size", index)
            yield model.finding(place, "batching", message, "Lower it, or raise max_batch_size.")
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        message = f"default_priority_level is {batching.default_priority_level}; priority_levels allows 1 … {levels}"
        place = node.at("default_priority_level")
        yield model.finding(place, "priority", message, f"Write a level from 1 (served first) to {levels}.")
    for level in batching.priority_queue_policy:
        if levels and not 1 <= level <= levels:
            place = node.entry("priority_queue_policy", str(level)).at("key")
            message = f"priority_queue_policy is for level {level}; priority_levels allows 1 … {levels}"
            yield model.finding(place, "priority", message, "Raise priority_levels, or delete the policy.")
    if batching.preserve_ordering and levels > 1:
        message = "preserve_ordering allows one priority level only"
        yield model.finding(node.at("preserve_ordering"), "priority", message, "Delete one of the two.")


def _hand_over(model: Model) -> Iterator[Finding]:
    """Triton's DynamicBatchScheduler prefetches only without these; see docs/tuning.md for the figures."""
    batching, node = model.config.dynamic_batching, model.where.at("dynamic_batching")
    given = [
        name
        for name, present in (
            ("priority_levels", batching.priority_levels),
            ("default_queue_policy", batching.HasField("default_queue_policy")),
        )
        if present
    ]
    if given:
        message = f"{given[0]} makes Triton look for a free instance when a request comes, else every 500 ms"
        fix = "Delete it, so that bursts are handed over at once. dit's own queue has max_queue_size and PRIORITY."
        yield model.finding(node.at(given[0]), "queue-policy", message, fix, "warning")


def _timeouts(model: Model) -> Iterator[Finding]:
    policy = model.config.dynamic_batching.default_queue_policy
    node = model.where.at("dynamic_batching", "default_queue_policy")
    timeout = policy.default_timeout_microseconds
    if policy.allow_timeout_override and not timeout:
        message = "a client's timeout may only shorten default_timeout_microseconds, which is 0: it has no effect"
        fix = "Set default_timeout_microseconds to the longest wait that is allowed."
        yield model.finding(node.at("allow_timeout_override"), "timeout", message, fix, "warning")
    if 0 < timeout < 1000:
        message = f"requests may wait {timeout} microseconds, less than a millisecond"
        fix = f"If milliseconds were meant, write {timeout * 1000}; for seconds, {timeout * 1_000_000}."
        yield model.finding(node.at("default_timeout_microseconds"), "timeout", message, fix, "warning")


def _instances(model: Model) -> Iterator[Finding]:
    from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

    if model.is_ensemble:
        return
    for index, group in enumerate(model.config.instance_group):
        node = model.where.at("instance_group", index)
        kind = ModelInstanceGroup.Kind.Name(group.kind)
        if group.gpus and kind in ("KIND_CPU", "KIND_MODEL"):
            message = f"a {kind} group cannot name gpus"
            fix = "Use KIND_GPU." if kind == "KIND_CPU" else "Delete gpus: a KIND_MODEL chooses its devices itself."
            yield model.finding(node.at("gpus"), "instance-group", message, fix)


def _warmup(model: Model) -> Iterator[Finding]:
    if model.is_ensemble:
        return
    inputs = {tensor.name: tensor for tensor in model.config.input}
    for index, sample in enumerate(model.config.model_warmup):
        node = model.where.at("model_warmup", index)
        for name, tensor in sample.inputs.items():
            entry = node.entry("inputs", name)
            if inputs and name not in inputs:
                message = f"warm-up {sample.name!r} has an input {name!r}, which the model has not"
                yield model.finding(entry.at("key"), "warmup", message, did_you_mean(name, inputs))
            data = tensor.input_data_file
            if data and not (model.directory / "warmup" / data).is_file():
                message = f"warm-up {sample.name!r} reads warmup/{data}, which is missing"
                fix = f"Put the file at {model.name}/warmup/{data}, or use zero_data: true."
                yield model.finding(entry.at("value", "input_data_file"), "warmup", message, fix)
        missing = sorted(name for name, tensor in inputs.items() if not tensor.optional and name not in sample.inputs)
        if missing:
            message = f"warm-up {sample.name!r} lacks the required input {missing[0]!r}"
            yield model.finding(node, "warmup", message, "Add it under inputs.")


def _cache(model: Model) -> Iterator[Finding]:
    config = model.config
    if not config.response_cache.enable:
        return
    node = model.where.at("response_cache")
    if config.model_transaction_policy.decoupled:
        message = "a decoupled model cannot use the response cache"
        yield model.finding(node, "cache", message, "Delete response_cache or model_transaction_policy.")
    if config.HasField("sequence_batching"):
        message = "a model with sequence_batching cannot use the response cache"
        yield model.finding(node, "cache", message, "Delete one of the two.")


def duplicate_keys(model: Model, name: str, entries: list[Any]) -> Iterator[Finding]:
    counts = Counter(entry.at("key").text for entry in entries)
    for entry in entries:
        key = entry.at("key").text
        if counts[key] > 1:
            counts[key] = 0  # the first one is where the reader starts to look
            message = f"{name} has {key!r} more than once; Triton keeps the last without a word"
            yield model.finding(entry.at("key"), "duplicate-key", message, "Keep one of them.")
