"""A repository against the machine that is to run it: GPUs, backends, the Python stub, memory."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from ditpack.models.checkpoint import Checkpoint, find_weights
from ditpack.tritonserver.check.ditpack_rules import Settings
from ditpack.tritonserver.check.findings import Finding, did_you_mean
from ditpack.tritonserver.check.machine import Machine
from ditpack.tritonserver.check.positions import Node
from ditpack.tritonserver.check.repository import Model, Repository
from ditpack.tritonserver.launch.interpreter import require_libpython
from ditpack.tritonserver.launch.serve_error import ServeError

# Fields of ModelConfig that tritonclient knows and tritonserver 2.51 (24.10), the embedded one, does not.
_NEWER_THAN_EMBEDDED = (("ensemble_scheduling", "max_inflight_requests"), ("model_metrics",))
# The folder of a checkpoint whose weights a model loads, by its settings; for others nothing is estimated.
_COMPONENTS = {
    "DitSettings": "transformer",
    "TextEncoderSettings": "text_encoder",
    "VaeDecoderSettings": "vae",
    "VaeEncoderSettings": "vae",
}
_NO_GPU = "no GPU here that CUDA can see"
_DESCRIBED = "--gpus N describes another machine's"
_OWN_STUB = "triton_python_backend_stub"


def check_machine(repository: Repository, machine: Machine) -> Iterator[Finding]:
    """Everything about the server and the GPUs; memory has its own function."""
    yield from _server(repository, machine)
    for model in repository.models.values():
        yield from _backend(model, machine)
        yield from _newer_fields(model, machine)
        yield from _gpus(model, machine)


def _server(repository: Repository, machine: Machine) -> Iterator[Finding]:
    if machine.server is None:
        if machine.server_error is not None:
            error = machine.server_error
            yield Finding(repository.path, 0, 0, "warning", "server", error.problem, error.remedy)
        return
    ours = [m for m in repository.models.values() if m.backend == "python" and not (m.directory / _OWN_STUB).exists()]
    if not ours or all("EXECUTION_ENV_PATH" in model.config.parameters for model in ours):
        return
    try:
        machine.server.stub()
        if machine.server.embedded:
            require_libpython()
    except ServeError as error:
        yield Finding(repository.path, 0, 0, "error", "stub", error.problem, error.remedy)


def _backend(model: Model, machine: Machine) -> Iterator[Finding]:
    server = machine.server
    if server is None or server.backends is None or not model.config.backend or model.is_ensemble:
        return
    installed = {path.name for path in server.backends.iterdir() if path.is_dir()}
    own = [*model.directory.glob("*.so"), *model.directory.glob("*/*.so")]
    if model.config.backend not in installed and not own:
        message = f"the tritonserver here has no backend {model.config.backend!r}"
        fix = f"{did_you_mean(model.config.backend, installed)} The server is {server.binary}."
        yield model.finding(model.where.at("backend"), "backend", message, fix)


def _newer_fields(model: Model, machine: Machine) -> Iterator[Finding]:
    if machine.server is None or not machine.server.embedded:
        return
    for path in _NEWER_THAN_EMBEDDED:
        parent = model.where.at(*path[:-1]) if len(path) > 1 else model.where
        if path[-1] in parent.fields:
            message = f"{path[-1]} is newer than the tritonserver here (2.51, embedded), which will not read the file"
            fix = "Delete it, or serve with a newer tritonserver (--tritonserver)."
            yield model.finding(parent.at(path[-1]), "newer-field", message, fix)


def _gpus(model: Model, machine: Machine) -> Iterator[Finding]:
    have = len(machine.gpus)
    for index, group in enumerate(model.config.instance_group):
        node = model.where.at("instance_group", index)
        if group.kind == ModelInstanceGroup.KIND_GPU and not have:
            message, fix = (
                f"KIND_GPU, and there is {_NO_GPU}",
                f"KIND_AUTO takes a GPU where there is one; {_DESCRIBED}.",
            )
            yield model.finding(node.at("kind"), "gpu", message, fix)
        elif group.kind in (ModelInstanceGroup.KIND_GPU, ModelInstanceGroup.KIND_AUTO):
            for place, gpu in enumerate(group.gpus):
                if not 0 <= gpu < have:
                    yield _no_such_gpu(model, node.at("gpus", place), gpu, have)


def check_devices(settings: Mapping[str, Settings], machine: Machine) -> Iterator[Finding]:
    """GPUs that a model is told to take by a parameter, which holds torch's names for them."""
    for step in settings.values():
        for name, value in step.values.items():
            devices = value if isinstance(value, tuple) else ()
            for gpu in [int(device.removeprefix("cuda:")) for device in devices if str(device).startswith("cuda:")]:
                if gpu >= len(machine.gpus):
                    yield _no_such_gpu(step.model, step.where(name), gpu, len(machine.gpus))


def _no_such_gpu(model: Model, node: Node, gpu: int, have: int) -> Finding:
    there = f"{'are' if have > 1 else 'is'} {have} GPU{'s' if have > 1 else ''} here" if have else f"is {_NO_GPU}"
    fix = f"Name a GPU from 0 to {have - 1}" if have else "Leave it out"
    return model.finding(node, "gpu", f"GPU {gpu} does not exist; there {there}", f"{fix}; {_DESCRIBED}.")


def check_memory(
    settings: Mapping[str, Settings], checkpoints: Mapping[str, Checkpoint], machine: Machine
) -> Iterator[Finding]:
    """Warn where the weights, and one step of ``token_budget`` tokens, cannot fit.

    A lower bound: weights in the dtype they are loaded in, and the widest moment of a block, six activations a token
    (the residual stream, q, k, v, and two in flight). CUDA's own memory, graphs and the VAE's peak come on top.
    """
    needed: dict[int | None, int] = defaultdict(int)  # GPU → bytes; None is the CPU's memory
    largest: dict[int | None, tuple[int, Settings]] = {}
    for name, step in settings.items():
        if name not in checkpoints:
            continue
        for place, count in _instances(step, machine):
            size = count * _bytes(step, checkpoints[name], on_gpu=place is not None)
            needed[place] += size
            if place not in largest or size > largest[place][0]:
                largest[place] = size, step
    for place, size in needed.items():
        have = machine.ram if place is None else machine.gpus[place]
        if have and size > have:
            step = largest[place][1]
            where = "this machine's memory" if place is None else f"GPU {place}"
            message = f"needs at least {size / 2**30:.1f} GiB of {where}, which has {have / 2**30:.1f} GiB"
            fix = "Lower token_budget, use quantization fp8 or dtype bfloat16, or spread the models over more GPUs."
            name = "token_budget" if "token_budget" in step.values else "checkpoint"
            yield step.model.finding(step.where(name), "memory", f"all models together {message}", fix, "warning")


def _instances(step: Settings, machine: Machine) -> Iterator[tuple[int | None, int]]:
    """(GPU or None, how many instances there) of every instance group."""
    every = range(len(machine.gpus))
    groups = list(step.model.config.instance_group)
    if not groups:
        yield from ((gpu, 1) for gpu in every or (None,))
    for group in groups:
        if group.kind == ModelInstanceGroup.KIND_MODEL:  # a whole copy on each of its devices
            devices = step.values.get("devices") or ()
            gpus = [int(device.removeprefix("cuda:")) for device in devices if device.startswith("cuda:")]
            yield from ((gpu, 1) for gpu in gpus if gpu in every)
        elif group.kind == ModelInstanceGroup.KIND_CPU or not every:
            yield None, max(1, group.count)
        else:
            yield from ((gpu, max(1, group.count)) for gpu in group.gpus or every if gpu in every)


def _bytes(step: Settings, checkpoint: Checkpoint, on_gpu: bool) -> int:
    component = _COMPONENTS.get(step.kind.__name__)
    if component is None or not (checkpoint.path / component).is_dir():
        return 0
    dtype = step.values["dtype"]
    width = 2 if dtype == "bfloat16" or (dtype == "auto" and on_gpu) else 4
    stored = 1 if step.values.get("quantization") == "fp8" else width
    total = _elements(checkpoint.path / component) * stored if checkpoint.weights == "stored" else 0
    if step.values.get("token_budget"):
        config = checkpoint.transformer_config
        hidden = config.get("num_attention_heads", 0) * config.get("attention_head_dim", 0)
        total += 6 * hidden * width * step.values["token_budget"]
    return total


def _elements(folder: Path) -> int:
    """Weights in a folder's safetensors files, from their headers alone."""
    total = 0
    for file in find_weights(folder):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total
