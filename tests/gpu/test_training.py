"""The training command on a GPU, at its smallest: compiled blocks, fused optimiser, half precision, painted sheets."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from ditpack.demo_model.painter import Job, Painter
from ditpack.demo_model.shapes import shape_icons
from ditpack.demo_model.train.presets import SMOKE
from ditpack.demo_model.train.run import CHECKPOINT, Options, train


def test_it_trains_compiled(tmp_path: Path) -> None:
    device = torch.device("cuda")
    train(shape_icons(), Options(tmp_path, SMOKE, device, 0.2, "dit", True, 4, "a test"), Console())
    log = (tmp_path / "train.log").read_text()
    assert "not compiled" not in log
    assert "nan" not in log
    painted = next(Painter(tmp_path / CHECKPOINT, device, torch.bfloat16).paint([Job("a red circle", (64, 64), 1)]))
    assert painted[0].shape == (64, 64, 3)
