"""The README's gallery: what a checkpoint paints, and what it makes of pictures by edits, without a server.

python tests/tools/gallery.py                      docs/gallery.jpg and docs/gallery-edits.jpg, by the embedded model
python tests/tools/gallery.py --checkpoint DIR --out DIR    another's; without edits where it makes none
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image

from ditpack.demo_model.painter import Job, Painter, Pixels, own_precision
from ditpack_client.contact_sheet import Entry, contact_sheet, side_by_side

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES, EDITED = "gallery.jpg", "gallery-edits.jpg"

# Prompt, width, height; the place in the list is the seed.
PROMPTS = (
    ("a red apple on a blue background", 128, 128),
    ("a pup on a pink background", 128, 128),
    ("two pink hearts, glossy style", 160, 96),
    ("a sun above a house", 96, 160),
    ("a fox on the left and an owl on the right", 192, 96),
    ("four eggs on a brown background", 128, 128),
    ("a hamburger, flat style", 128, 128),
    ("an automobile on the right on a teal background", 160, 96),
    ("a rocket, a star and a crescent moon on a black background", 192, 64),
    ("three strawberries", 112, 144),
    ("a tulip on an orange background", 64, 192),
    ("a penguin, glossy style", 192, 192),
    ("a teapot next to a cupcake on a purple background", 160, 96),
    ("a cactus on a yellow background, flat style", 96, 96),
    ("a mushroom at the bottom on a green background", 96, 160),
)
# Instruction, places in PROMPTS of what is edited; the result is as large as the last of them.
EDITS = (
    ("change the background to green", (2,)),
    ("make it two", (6,)),
    ("add a snowman on the right", (0,)),
    ("remove the house", (3,)),
    ("swap left and right", (4,)),
    ("combine both pictures", (1, 0)),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="embedded")
    parser.add_argument("--out", type=Path, default=DOCS)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    painter = Painter(options.checkpoint, device, own_precision(device))
    jobs = [Job(prompt, (width, height), seed) for seed, (prompt, width, height) in enumerate(PROMPTS)]
    pictures = next(painter.paint(jobs, options.steps))
    save(jobs, pictures, options.out / PICTURES, columns=5)
    if painter.edits:
        edits = [
            Job(text, jobs[places[-1]].size, seed, tuple(pictures[place] for place in places))
            for seed, (text, places) in enumerate(EDITS)
        ]
        save(edits, next(painter.paint(edits, options.steps)), options.out / EDITED, columns=3)


def save(jobs: list[Job], made: list[Pixels], file: Path, columns: int) -> None:
    """Each picture under its prompt, after those that it was made from."""
    entries = [
        Entry(
            side_by_side([Image.fromarray(pixels) for pixels in (*job.pictures, picture)]),
            job.prompt,
            f"{job.size[0]}x{job.size[1]} · seed {job.seed}",
        )
        for job, picture in zip(jobs, made, strict=True)
    ]
    contact_sheet(entries, title="", columns=columns, scale=1).save(file, quality=90)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
