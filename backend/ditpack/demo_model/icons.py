"""Icons as SVG with names, and as sprites to compose scenes from."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ditpack.demo_model.packages import FLUENT_EMOJI_FLAT, NOTO_EMOJI, fetch, read_json

FLAT, GLOSSY = "flat", "glossy"
STYLES = (FLAT, GLOSSY)
# Left out: people (near-duplicates by gender and profession), symbols (letters, arrows) and flags.
_CATEGORIES = (
    *("Animals & Nature", "Food & Drink", "Objects", "Travel & Places", "Activities"),
    "Smileys & Emotion",
)
_OTHERS_LEFT_OUT = Path(__file__).with_name("left_out.txt")
_LEFT_OUT = re.compile(
    r"(-|^)(light|medium|dark|medium-light|medium-dark)(-skin-tone|$)"
    r"|-(oclock|thirty)$"  # 24 clocks that differ in their hands alone
    r"|^(books|houses|musical-notes|two-hearts)$"  # one icon each, by names that are several of another
)
# One name where the two sets differ.
_RESPELT = {
    "piata": "pinata",
    "phoenix-bird": "phoenix",
    "smiling-face-with-open-hands": "hugging-face",
    "enraged-face": "pouting-face",
    "blackbird": "black-bird",
}
_SMALLEST_MIP = 16
_PARALLEL_FROM = 200  # icons from which it pays to start processes


@dataclass(frozen=True, slots=True)
class Icon:
    """``name`` as its set spells it, with hyphens; the same thing has the same name in both styles."""

    name: str
    style: str
    svg: str


def published_icons(directory: Path) -> list[Icon]:
    """Both published sets, fetched into ``directory`` unless they are there.

    Raises:
        PackageError: as ``packages.fetch``.
    """
    return [
        *read_icons(fetch(FLUENT_EMOJI_FLAT, directory), FLAT),
        *read_icons(fetch(NOTO_EMOJI, directory), GLOSSY),
    ]


def read_icons(tarball: Path, style: str) -> list[Icon]:
    """The icons of an iconify package that scenes are made of, by name."""
    icon_set, metadata = read_json(tarball, "icons.json"), read_json(tarball, "metadata.json")
    wanted = {name for category in _CATEGORIES for name in metadata["categories"].get(category, ())}
    left_out = {line for line in _OTHERS_LEFT_OUT.read_text().splitlines() if line and not line.startswith("#")}
    icons: dict[str, Icon] = {}
    for name, icon in sorted(icon_set["icons"].items()):
        if name not in wanted or icon.get("hidden") or _LEFT_OUT.search(name):
            continue
        width, height = (icon.get(side, icon_set.get(side, 16)) for side in ("width", "height"))
        box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        if (name := _RESPELT.get(name, name)) in left_out:
            continue
        icons.setdefault(name, Icon(name, style, svg(icon["body"], box)))
    return [icons[name] for name in sorted(icons)]


def svg(body: str, box: str) -> str:
    """A whole SVG file around ``body``; ``box`` is its viewBox."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box}">'
        f"{body}</svg>"
    )


@dataclass(frozen=True, slots=True)
class Sprites:
    """Icons with premultiplied alpha: uint8 [n, 4, side, side] each, RGBA, the first the largest, then halved."""

    mips: tuple[Tensor, ...]

    @property
    def side(self) -> int:
        return self.mips[0].shape[-1]

    def to(self, device: torch.device) -> Sprites:
        return Sprites(tuple(mip.to(device) for mip in self.mips))


def rasterise(icons: Sequence[Icon], side: int) -> Sprites:
    """``icons`` as sprites of ``side`` pixels, a power of two of at least 16."""
    if side < _SMALLEST_MIP or side & (side - 1):
        raise ValueError(f"side = {side}: must be a power of two of at least {_SMALLEST_MIP}")
    draw = partial(_draw, side=side)
    files = [icon.svg for icon in icons]
    if len(files) < _PARALLEL_FROM:
        return _sprites(map(draw, files))
    with ProcessPoolExecutor() as pool:
        return _sprites(pool.map(draw, files, chunksize=32))


def _draw(svg_text: str, side: int) -> npt.NDArray[np.uint8]:
    """uint8 [4, side, side], alpha premultiplied."""
    import resvg_py

    png = resvg_py.svg_to_bytes(svg_string=svg_text, width=side, skip_system_fonts=True)
    image = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    pixels = np.asarray(image if image.size == (side, side) else image.resize((side, side))).astype(np.float32)
    pixels[..., :3] *= pixels[..., 3:] / 255
    return pixels.round().astype(np.uint8).transpose(2, 0, 1)


def _sprites(drawn: Iterable[npt.NDArray[np.uint8]]) -> Sprites:
    mips = [torch.from_numpy(np.stack(list(drawn)))]
    while mips[-1].shape[-1] > _SMALLEST_MIP:
        halves = [F.avg_pool2d(part.float(), 2).round().to(torch.uint8) for part in mips[-1].split(256)]
        mips.append(torch.cat(halves))
    return Sprites(tuple(mips))
