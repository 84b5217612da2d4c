"""Giving modules built on the meta device their weights, on the device, one tensor at a time: stored or random ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ditpack.models.checkpoint import Checkpoint, CheckpointError, find_weights

_STORED = ("F32", "BF16", "F16")  # a quantised dtype would need scales that this loader does not know
_NAMED = 10  # how many keys an error spells out before it only counts


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Where a stored tensor goes: it is part ``index`` of ``count``, stacked in the first dimension, of ``name``."""

    name: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one ``load_into`` put on the device. ``bytes`` is the memory the weights take there."""

    directory: Path
    device: torch.device
    dtype: torch.dtype
    tensors: int
    parameters: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.directory.name}: {self.parameters / 1e6:.2f} M parameters, {self.bytes / 2**20:.1f} MiB as "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device} in {self.seconds:.1f} s"
        )


def load_component(
    checkpoint: Checkpoint,
    component: str,
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    rename: Callable[[str], str | Part | None] | None = None,
) -> LoadReport:
    """Give ``module`` the weights of a component folder of ``checkpoint``, or random ones, as the checkpoint says.

    Raises:
        CheckpointError: as ``load_into``.
    """
    directory = checkpoint.path / component
    if checkpoint.weights == "random":
        return fill_random(module, directory, device, dtype)
    return load_into(module, directory, device, dtype, rename)


def load_into(
    module: nn.Module,
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    rename: Callable[[str], str | Part | None] | None = None,
) -> LoadReport:
    """Give ``module``, built on the meta device, the weights of ``directory``'s safetensors files.

    Each tensor goes from the file to ``device`` and to ``dtype`` and becomes the module's own: no more than one tensor
    exists twice at any time. The files' headers are checked in full before the first weight is read. ``rename`` turns a
    stored name into the module's (or a ``Part`` of it), or into None for a weight that is left in the file on purpose.

    Raises:
        CheckpointError: naming missing and unexpected keys, wrong shapes, dtypes or an unreadable file.
    """
    start = time.monotonic()
    expected = module.state_dict(keep_vars=True)
    stored = _scan(find_weights(directory), rename)
    _compare(directory, expected, stored)

    by_file: dict[Path, list[tuple[Part, str]]] = {}
    for part, (file, key, _shape) in stored.items():
        by_file.setdefault(file, []).append((part, key))
    for file, parts in by_file.items():
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for part, key in parts:
                tensor = tensors.get_tensor(key)
                if part.count > 1:
                    _assign_part(module, part, tensor, device, dtype)
                else:
                    # On the CPU the tensor is a view of the mapped file, which may be replaced in service: copy it.
                    _assign(module, part.name, tensor.to(dtype=dtype, copy=device.type == "cpu"))

    return _report(module, {part.name for part in stored}, directory, device, dtype, start)


@torch.no_grad()
def fill_random(module: nn.Module, directory: Path, device: torch.device, dtype: torch.dtype) -> LoadReport:
    """Give ``module``, built on the meta device, random weights, the same for the same kind of device.

    They are of a size that keeps activations of order 1, as a trained model's; ``directory`` only names it.
    """
    start = time.monotonic()
    generator = torch.Generator(device).manual_seed(0)
    names = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    for name in names:
        parameter = module.get_parameter(name)
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        if tensor.squeeze().dim() > 1:
            # Small gates, as in a trained transformer: with gates of 1 its depth alone would blow up all rounding.
            gain = 0.1 if "_mod." in name else 1.0
            tensor.normal_(0, gain / math.sqrt(math.prod(tensor.shape[1:])), generator=generator)
        elif "norm" in name and not name.endswith("bias"):
            tensor.fill_(1)
        else:
            tensor.normal_(0, 0.02, generator=generator)
        _assign(module, name, tensor)
    return _report(module, set(names), directory, device, dtype, start)


def _report(
    module: nn.Module, names: set[str], directory: Path, device: torch.device, dtype: torch.dtype, start: float
) -> LoadReport:
    left = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    if left:
        raise RuntimeError(
            f"no checkpoint holds {', '.join(left)} of {type(module).__name__}: build it off the meta device"
        )
    loaded = [tensor for name, tensor in module.state_dict().items() if name in names]
    return LoadReport(
        directory=directory,
        device=device,
        dtype=dtype,
        tensors=len(loaded),
        parameters=sum(tensor.numel() for tensor in loaded),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in loaded),
        seconds=time.monotonic() - start,
    )


_Stored = dict[Part, tuple[Path, str, tuple[int, ...]]]


def _scan(files: Iterable[Path], rename: Callable[[str], str | Part | None] | None) -> _Stored:
    """Part of the module → (file, stored name, shape), from the headers alone."""
    found: _Stored = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                    name = rename(key) if rename else key
                    if name is None:
                        continue
                    part = name if isinstance(name, Part) else Part(name, 0, 1)
                    if part in found:
                        raise CheckpointError(f"{file}: {key}: the same weight is also in {found[part][0].name}")
                    header = tensors.get_slice(key)
                    if header.get_dtype() not in _STORED:
                        raise CheckpointError(
                            f"{file}: {key}: stored as {header.get_dtype()}; must be {' or '.join(_STORED)}"
                        )
                    found[part] = (file, key, tuple(header.get_shape()))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from None
    return found


def _compare(directory: Path, expected: dict[str, torch.Tensor], stored: _Stored) -> None:
    problems = []
    present = {part.name for part in stored}
    missing = [name for name in expected if name not in present]
    for part in sorted({Part(p.name, i, p.count) for p in stored for i in range(p.count)} - set(stored)):
        missing.append(f"part {part.index + 1} of {part.count} of {part.name}")
    if missing:
        problems.append(f"missing: {_some(missing)}")
    if unexpected := [key for part, (_file, key, _shape) in stored.items() if part.name not in expected]:
        problems.append(f"unexpected: {_some(unexpected)}")
    shapes = []
    for part, (_file, key, shape) in stored.items():
        if part.name in expected:
            first, *rest = expected[part.name].shape
            wanted = (first // part.count, *rest)
            if shape != wanted:
                shapes.append(f"{key} is {list(shape)}, must be {list(wanted)}")
    if shapes:
        problems.append(f"wrong shape: {_some(shapes)}")
    if problems:
        raise CheckpointError(f"{directory}: the weights do not fit the config: {'; '.join(problems)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown}, … ({len(names)} in all)"


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def _assign_part(module: nn.Module, part: Part, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Copy ``tensor`` into its share of a parameter that is allocated with its first part."""
    whole = module.get_parameter(part.name)
    if whole.is_meta:
        _assign(module, part.name, torch.empty(whole.shape, dtype=dtype, device=device))
        whole = module.get_parameter(part.name)
    whole.data.chunk(part.count)[part.index].copy_(tensor)
