"""The gallery: one command makes its sheets, from a checkpoint's pictures and edits of them."""

from __future__ import annotations

from pathlib import Path

import gallery
from PIL import Image


def sheets(checkpoint: Path, out: Path) -> dict[str, tuple[int, int]]:
    out.mkdir()
    gallery.main(["--checkpoint", str(checkpoint), "--out", str(out), "--steps", "1"])
    found = {}
    for file in out.iterdir():
        with Image.open(file) as sheet:
            found[file.name] = sheet.size
    return found


def test_one_command_makes_the_sheets(tiny_edit_2509_checkpoint: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    both = sheets(tiny_edit_2509_checkpoint, tmp_path / "edits")
    assert set(both) == {gallery.PICTURES, gallery.EDITED}
    assert sheets(tiny_checkpoint, tmp_path / "text") == {gallery.PICTURES: both[gallery.PICTURES]}
