"""Sheets of what a checkpoint paints: held-out prompts, and held-out edits beside what they started from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from ditpack.demo_model.captions import Captions
from ditpack.demo_model.edits import KINDS, EditMaker
from ditpack.demo_model.icons import Sprites
from ditpack.demo_model.painter import Job, Painter
from ditpack.demo_model.render import draw
from ditpack.demo_model.scenes import Random, SceneMaker, Size
from ditpack_client.contact_sheet import Entry, contact_sheet, side_by_side


def paint_sheet(
    painter: Painter,
    scenes: SceneMaker,
    sprites: Sprites,
    sizes: list[Size],
    edit_sizes: list[Size],
    file: Path,
    seed: int = 9,
) -> None:
    """Two rows of prompts and, of a checkpoint that edits, an edit of each kind; the same ones every time."""
    random: Random = np.random.default_rng(seed)
    captions = Captions(scenes.icons)
    jobs: list[Job] = []
    labels: list[str] = []
    for index in range(12):
        scene = scenes.draw(random, sizes[index % len(sizes)], held_out=True)
        jobs.append(Job(captions.caption(random, scene), scene.size, index))
        labels.append("prompt")
    edits = EditMaker(scenes, captions)
    for index, kind in enumerate(KINDS if painter.edits else ()):
        edit = edits.draw(random, kind, edit_sizes[index % len(edit_sizes)], references=2, held_out=True)
        pictures = tuple(draw(sprites, scene) for scene in edit.sources)
        jobs.append(Job(edit.instruction, edit.target.size, index, pictures))
        labels.append(kind)
    painted = [picture for pack in painter.paint(jobs) for picture in pack]
    entries = [
        Entry(
            side_by_side([Image.fromarray(x) for x in (*job.pictures, after)]),
            job.prompt,
            f"{label} · {job.size[0]}x{job.size[1]}",
        )
        for job, label, after in zip(jobs, labels, painted, strict=True)
    ]
    contact_sheet(entries, title="held-out prompts and edits", columns=6, scale=1).save(file)
