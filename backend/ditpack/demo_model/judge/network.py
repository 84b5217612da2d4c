"""The classifier: which icons a picture shows, how many things, in which style."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ditpack.errors import DitpackError

# Comes with the tests of a checkout; the package is without it.
CHECKOUTS_JUDGE = Path(__file__).resolve().parents[4] / "tests" / "tools" / "judge.safetensors"
SIDE = 64  # pixels of the square that it looks at
MAX_COUNT = 4


class JudgeError(DitpackError):
    """A file that holds no judge."""


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x + self.layers(x))


class Judge(nn.Module):
    """Sees pictures [N, 3, height, width] in -1 … 1 of any one size. ``names`` are those of the icons it knows."""

    def __init__(self, names: Sequence[str], styles: Sequence[str], width: int) -> None:
        super().__init__()
        self.names, self.styles, self.width = tuple(names), tuple(styles), width
        layers: list[nn.Module] = [nn.Conv2d(3, width, 5, stride=2, padding=2), nn.SiLU()]
        for level in (1, 2, 3):
            layers += [nn.Conv2d(level * width, (level + 1) * width, 3, stride=2, padding=1), nn.SiLU()]
            layers.append(Block((level + 1) * width))
        features = 8 * width
        # Where something is may matter: the last map, SIDE / 16 pixels wide, is not averaged.
        layers += [nn.Flatten(), nn.Linear(4 * width * (SIDE // 16) ** 2, features), nn.SiLU()]
        self.body = nn.Sequential(*layers)
        self.name = nn.Linear(features, len(names))
        self.count = nn.Linear(features, MAX_COUNT)
        self.style = nn.Linear(features, len(styles))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the names [N, names], of the counts 1 … 4 [N, 4] and of the styles [N, styles]."""
        features = self.body(letterbox(pictures).to(memory_format=torch.channels_last))
        return self.name(features), self.count(features), self.style(features)


def letterbox(pictures: Tensor) -> Tensor:
    """[N, 3, height, width] → [N, 3, SIDE, SIDE]: scaled to fit, and the colour of its border around it."""
    height, width = pictures.shape[-2:]
    longer = max(height, width)
    fitted = (max(1, round(height * SIDE / longer)), max(1, round(width * SIDE / longer)))
    scaled = F.interpolate(pictures, fitted, mode="bilinear", antialias=longer > SIDE, align_corners=False)
    if fitted == (SIDE, SIDE):
        return scaled
    canvas = border_colour(pictures)[:, :, None, None].repeat(1, 1, SIDE, SIDE)
    top, left = (SIDE - fitted[0]) // 2, (SIDE - fitted[1]) // 2
    canvas[:, :, top : top + fitted[0], left : left + fitted[1]] = scaled
    return canvas


def border_colour(pictures: Tensor) -> Tensor:
    """The median colour [N, 3] of the outermost pixels."""
    edges = (pictures[:, :, 0], pictures[:, :, -1], pictures[:, :, :, 0], pictures[:, :, :, -1])
    return torch.cat(edges, dim=2).median(dim=2).values


def save_judge(judge: Judge, file: Path, accuracy: dict[str, float]) -> None:
    """Write ``judge`` in half precision, with what it knows and how right it was on scenes that it had not seen."""
    about = {"names": judge.names, "styles": judge.styles, "width": judge.width, "accuracy": accuracy}
    weights = {name: value.half().cpu().contiguous() for name, value in judge.state_dict().items()}
    save_file(weights, file, metadata={"judge": json.dumps(about)})


def load_judge(file: Path, device: torch.device) -> tuple[Judge, dict[str, float]]:
    """The judge of ``file``, in fp32, and its own accuracy.

    Raises:
        JudgeError: there is no judge in it.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            about = json.loads(stored.metadata()["judge"])
            weights = {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118
        judge = Judge(about["names"], about["styles"], about["width"])
        judge.load_state_dict(weights)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise JudgeError(f"{file}: is not a judge: {error}") from error
    return judge.to(device).eval(), cast(dict[str, float], about["accuracy"])
