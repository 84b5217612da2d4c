"""``python -m ditpack.demo_model.judge``: how well checkpoints follow held-out prompts and edit instructions."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ditpack.demo_model.commands import errors_told
from ditpack.demo_model.icons import Sprites, published_icons, rasterise
from ditpack.demo_model.judge.checks import Pixels
from ditpack.demo_model.judge.network import CHECKOUTS_JUDGE, load_judge
from ditpack.demo_model.judge.score import Eyes, Task, edits, name_prompts, prompts, score, synonym_prompts
from ditpack.demo_model.painter import Job, Painter, own_precision
from ditpack.demo_model.render import draw
from ditpack.demo_model.scenes import SceneMaker
from ditpack.demo_model.shapes import shape_icons

BARS = {"background": 0.95, "count": 0.9, "icon": 0.85, "place": 0.9}
EDIT_BAR = 0.8
EVERY_NAME = "every name"


def main(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Directories of checkpoints; embedded is the package's own.")
    ],
    judge: Annotated[
        Path,
        typer.Option(
            help="What training left as judge.safetensors.", show_default="tests/tools/judge.safetensors of a checkout"
        ),
    ] = CHECKOUTS_JUDGE,
    icons: Annotated[Path, typer.Option(help="Where the two npm packages are, or are downloaded to.")] = Path(
        ".cache/icons"
    ),
    shapes: Annotated[bool, typer.Option(help="Judge on the smoke preset's shapes instead of the icons.")] = False,
    number: Annotated[int, typer.Option("--prompts", min=1, help="Held-out prompts.")] = 500,
    number_of_edits: Annotated[int, typer.Option("--edits", min=0, help="Held-out edits of each kind.")] = 100,
    references: Annotated[int, typer.Option(min=2, max=3, help="Pictures that are combined.")] = 2,
    every_name: Annotated[
        bool, typer.Option("--names/--no-names", help="Every name once too, and which are painted as something else.")
    ] = True,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 20,
    guidance: Annotated[float, typer.Option(help="true_cfg_scale.")] = 3.0,
    device: Annotated[str, typer.Option(help="cuda or cpu; auto takes a GPU where there is one.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none or fp8.")] = "none",
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Judge checkpoints; beside them, the true scenes, which say how far the judge can be believed."""
    console = Console()
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    with errors_told(console):
        used = shape_icons() if shapes else published_icons(icons)
        scenes, sprites = SceneMaker(used), rasterise(used, 64 if shapes else 256)  # forks: before CUDA starts
        network, accuracy = load_judge(judge, where)
        eyes = Eyes(network, scenes)
        text_tasks = prompts(scenes, number) + synonym_prompts(scenes, max(1, number // 5))
        edit_tasks = edits(scenes, number_of_edits, references)
        names = name_prompts(scenes) if every_name else []
        columns, mistaken = {}, {}
        columns["true scenes"], mistaken["true scenes"] = judged(
            eyes, text_tasks + edit_tasks, names, lambda tasks: _true(tasks, sprites)
        )
        for checkpoint in checkpoints:
            painter = Painter(checkpoint, where, own_precision(where), quantization=quantization)
            tasks = text_tasks + (edit_tasks if painter.edits else [])
            began = time.monotonic()
            columns[checkpoint], mistaken[checkpoint] = judged(
                eyes, tasks, names, partial(_painted, painter, sprites, steps, guidance, console)
            )
            seconds = time.monotonic() - began
            console.print(f"{checkpoint}: {len(tasks) + len(names)} pictures in {seconds:.0f} s", highlight=False)
    console.print(table(columns))
    for column, texts in mistaken.items():
        if texts:
            console.print(f"{column}, taken for something else: {', '.join(texts)}", highlight=False)
    console.print(f"The judge itself, on held-out scenes: {accuracy}", highlight=False)
    if out:
        result: dict[str, Any] = {
            "judge": accuracy, "prompts": number, "edits": number_of_edits, "steps": steps, "guidance": guidance,
            "device": str(where), "quantization": quantization, "figures": columns, "mistaken": mistaken,
        }  # fmt: skip
        out.write_text(json.dumps(result, indent=1) + "\n")


def judged(
    eyes: Eyes,
    tasks: list[Task],
    names: list[Task],
    show: Callable[[list[Task]], Iterable[tuple[Task, Pixels]]],
) -> tuple[dict[str, float], list[str]]:
    """Figures of the pictures that ``show`` has for ``tasks``, and what of ``names`` was taken for another."""
    figures = score(eyes, show(tasks))
    if not names:
        return figures, []
    mistaken = [task.text for task, picture in show(names) if not eyes.recognises(task, picture)]
    return figures | {EVERY_NAME: round(1 - len(mistaken) / len(names), 4)}, mistaken


def table(columns: dict[str, dict[str, float]]) -> Table:
    """A row a metric; what misses its bar is marked."""
    shown = Table("", "at least", *columns)
    for metric in next(iter(columns.values())):
        bar = EDIT_BAR if metric.startswith("edit ") else BARS.get(metric)
        cells = []
        for figures in columns.values():
            value = figures.get(metric)
            cells.append("–" if value is None else f"{value:.1%}" + (" !" if bar and value < bar else ""))
        shown.add_row(metric, f"{bar:.0%}" if bar else "", *cells)
    return shown


def _true(tasks: Sequence[Task], sprites: Sprites) -> Iterator[tuple[Task, Pixels]]:
    for task in tasks:
        yield task, draw(sprites, task.scene)


def _painted(
    painter: Painter, sprites: Sprites, steps: int, guidance: float, console: Console, tasks: Sequence[Task]
) -> Iterator[tuple[Task, Pixels]]:
    jobs = [
        Job(task.text, task.scene.size, index, tuple(draw(sprites, scene) for scene in task.sources))
        for index, task in enumerate(tasks)
    ]
    together = 64 if painter.sampler.device.type == "cuda" else 8
    packs = painter.paint(jobs, steps, guidance, together)
    done = 0
    for pictures in track(packs, total=-(-len(jobs) // together), console=console, description="painting"):
        yield from zip(tasks[done:], pictures, strict=False)
        done += len(pictures)


if __name__ == "__main__":
    typer.run(main)
