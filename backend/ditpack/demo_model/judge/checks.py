"""What pixels alone tell of a picture: the colour of its background, and where the rest is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ditpack.demo_model.scenes import COLOURS, cells

Pixels = npt.NDArray[np.uint8]
_DIFFERENT = 40  # of 255, in any channel, from the background's colour
_OFF_CENTRE = 0.1  # of the side: how far the middle of what is shown must be from the picture's to be at a side


def background_of(picture: Pixels) -> str:
    """The name in ``scenes.COLOURS`` nearest to the median colour of the outermost pixels."""
    colour = _border(picture)
    return min(COLOURS, key=lambda name: float(np.abs(np.array(COLOURS[name]) - colour).sum()))


def place_of(picture: Pixels) -> str:
    """Where what is not background is: "centre", "left", "right", "top" or "bottom"; "nowhere" without any."""
    shown = (np.abs(picture.astype(np.float64) - _border(picture)) > _DIFFERENT).any(axis=2)
    rows, columns = np.nonzero(shown)
    if not len(rows):
        return "nowhere"
    height, width = shown.shape
    across, down = (columns.mean() + 0.5) / width - 0.5, (rows.mean() + 0.5) / height - 0.5
    if max(abs(across), abs(down)) < _OFF_CENTRE:
        return "centre"
    if abs(across) >= abs(down):
        return "left" if across < 0 else "right"
    return "top" if down < 0 else "bottom"


def regions(picture: Pixels, layout: str, count: int) -> list[Pixels]:
    """The part of ``picture`` that each icon of a layout has for itself."""
    height, width = picture.shape[:2]
    parts = []
    for x, y, across, down in cells(layout, count):
        left, top = round((x - across / 2) * width), round((y - down / 2) * height)
        parts.append(picture[top : top + round(down * height), left : left + round(across * width)])
    return parts


def _border(picture: Pixels) -> npt.NDArray[np.float64]:
    edges = (picture[0], picture[-1], picture[:, 0], picture[:, -1])
    return np.asarray(np.median(np.concatenate(edges).astype(np.float64), axis=0))
