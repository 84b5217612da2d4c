"""``dit`` over several devices: what its settings may be, and a request through the door to two processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_triton import FakeModel, triton_args

from ditpack.request import Limits, resolve
from ditpack.tritonserver.dit_door import DitDoor
from ditpack.tritonserver.parameters import DitSettings, Instance, ParameterError


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("none", ()),
        ("0,1", ("cuda:0", "cuda:1")),
        (" 3, 1 ,2", ("cuda:3", "cuda:1", "cuda:2")),
        ("cpu,cpu", ("cpu",) * 2),
    ],
)
def test_devices(text: str, devices: tuple[str, ...]) -> None:
    settings = Instance.from_args(triton_args("dit", {"devices": text})).settings(DitSettings)
    assert settings.devices == devices


@pytest.mark.parametrize(
    "text", ["", "0", "cpu", "0,0", "0,00", "0,cpu", "cuda:0,cuda:1", "-1,0", "0,,1", "0;1", "two"]
)
def test_wrong_devices(text: str) -> None:
    with pytest.raises(ParameterError, match=r"parameter devices = .*must be none, two or more different GPU ordinals"):
        Instance.from_args(triton_args("dit", {"devices": text})).settings(DitSettings)


@pytest.mark.parametrize(
    ("kind", "parameters", "told"),
    [
        (
            "MODEL",
            {"devices": "cpu,cpu,cpu"},
            "'cpu,cpu,cpu': 4 attention heads cannot be split over 3 devices, but over 1, 2, 4; or set",
        ),
        ("MODEL", {}, "devices = 'none': must name the devices"),
        ("CPU", {"devices": "cpu,cpu"}, "instance_group.kind = 'KIND_CPU': must be KIND_MODEL"),
        ("GPU", {"devices": "0,1"}, "instance_group.kind = 'KIND_GPU': must be KIND_MODEL"),
        ("MODEL", {"devices": "97,98"}, "devices = '97,98': cuda:9"),
        ("MODEL", {"devices": "cpu,cpu", "parallel": "heads"}, "parallel = 'heads': must be one of tokens, rows"),
        ("MODEL", {"devices": "cpu,cpu", "sp_padding": "none"}, "must be one of segment, masked, unmasked"),
        ("MODEL", {"devices": "cpu,cpu", "worker_timeout_s": "0"}, "must be a number from 1.0 to 3600.0"),
        ("MODEL", {"devices": "cpu,cpu", "lost_workers": "ignore"}, "must be one of restart, refuse"),
    ],
)
def test_what_cannot_be_is_told(kind: str, parameters: dict[str, str], told: str, tiny_checkpoint: Path) -> None:
    with pytest.raises(ParameterError) as error:
        DitDoor.load(triton_args("dit", parameters | {"checkpoint": str(tiny_checkpoint)}, kind))
    assert "model 'dit': parameter " in str(error.value)
    assert told in str(error.value)


def test_rows_need_no_heads(tiny_checkpoint: Path) -> None:
    """Three devices for four heads: whole rows can be shared out. Readiness is the engine's."""
    parameters = {"checkpoint": str(tiny_checkpoint), "devices": "cpu,cpu,cpu", "parallel": "rows"}
    door = DitDoor.load(triton_args("dit", parameters, "MODEL"))
    try:
        assert door.is_ready()
        model = FakeModel("dit", instance=door)
        limits = Limits(default_width=64, default_height=32, min_size=32)
        request = resolve({"PROMPT": "a red kite", "SEED": 7, "NUM_INFERENCE_STEPS": 2}, limits)
        embeds = np.full((5, 32), 0.5, np.float32)
        inputs = {"REQUEST": np.array([request.to_json().encode()], np.object_)}
        (answer,) = model.infer(model.request(inputs | {"EMBEDS": embeds, "NEGATIVE_EMBEDS": -embeds[:3]}))
        assert answer.outputs["LATENTS"].shape == (16, 4, 8)
    finally:
        door.finalize()
    assert not door.is_ready()
