"""Weights reach the module whole and once, or an error names what does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ditpack.models.checkpoint import CheckpointError
from ditpack.models.weights import LoadReport, load_into

CPU = torch.device("cpu")


class Small(nn.Module):
    """Two layers and a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("mean", torch.zeros(4))


def on_meta() -> Small:
    with torch.device("meta"):
        return Small()


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Two shards with an index, as diffusers writes them."""
    tensors = {name: torch.randn(tensor.shape) for name, tensor in Small().state_dict().items()}
    write_shards(tmp_path, tensors)
    return tensors


def write_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, directory / file)
    index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def load(directory: Path, dtype: torch.dtype = torch.float32) -> LoadReport:
    return load_into(on_meta(), directory, CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_arrives_in_dtype(tmp_path: Path, stored: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    module = on_meta()
    report = load_into(module, tmp_path, CPU, dtype)
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, stored[name].to(dtype)), name
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert report.tensors == 5
    assert report.parameters == 3 * 4 + 4 + 16 + 4 + 4
    assert report.bytes == report.parameters * torch.finfo(dtype).bits // 8
    assert report.seconds >= 0
    assert "MiB" in str(report)
    assert tmp_path.name in str(report)


def test_the_files_may_change_afterwards(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    module = on_meta()
    load_into(module, tmp_path, CPU, torch.float32)
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, stored[name]), name


def test_rename_and_leaving_out(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    renamed = {f"model.{name}": tensor for name, tensor in stored.items()} | {"visual.x": torch.zeros(2)}
    write_shards(tmp_path, renamed)
    module = on_meta()
    load_into(
        module,
        tmp_path,
        CPU,
        torch.float32,
        rename=lambda key: None if key == "visual.x" else key.removeprefix("model."),
    )
    assert torch.equal(module.first.weight, stored["first.weight"])


def test_missing_unexpected_and_misshapen_keys_are_all_named(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    del stored["first.bias"]
    stored["extra.weight"] = torch.zeros(2)
    stored["mean"] = torch.zeros(5)
    write_shards(tmp_path, stored)
    module = on_meta()
    with pytest.raises(CheckpointError) as caught:
        load_into(module, tmp_path, CPU, torch.float32)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "missing: first.bias" in message
    assert "unexpected: extra.weight" in message
    assert "mean is [5], must be [4]" in message
    assert all(parameter.is_meta for parameter in module.parameters())  # nothing was loaded


def test_long_lists_are_counted(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path, stored | {f"extra.{index:02d}": torch.zeros(1) for index in range(25)})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "(25 in all)" in str(caught.value)
    assert len(re.findall(r"extra\.\d\d", str(caught.value))) == 10


def test_the_same_weight_twice(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    save_file(stored, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"the same weight is also in model-1\.safetensors"):
        load(tmp_path)


def test_a_quantised_weight_is_refused(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    stored["first.weight"] = stored["first.weight"].to(torch.float8_e4m3fn)
    write_shards(tmp_path, stored)
    with pytest.raises(CheckpointError, match=r"first\.weight: stored as F8_E4M3; must be F32"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, -4])
def test_a_truncated_file_is_named(tmp_path: Path, stored: dict[str, torch.Tensor], keep: int) -> None:
    file = tmp_path / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: not a readable safetensors file"):
        load(tmp_path)


def test_a_buffer_no_file_holds_is_a_bug_not_garbage(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    module = on_meta()
    module.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(RuntimeError, match="table"):
        load_into(module, tmp_path, CPU, torch.float32)
