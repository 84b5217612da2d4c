"""``python -m ditpack.demo_model.train``: from two npm packages to the checkpoint that ditpack embeds."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ditpack.demo_model.commands import claim, errors_told
from ditpack.demo_model.icons import published_icons
from ditpack.demo_model.shapes import shape_icons
from ditpack.demo_model.train.presets import PRESETS, PresetName
from ditpack.demo_model.train.run import Options, train


class StageName(enum.StrEnum):
    """The stages in their order."""

    JUDGE = "judge"
    VAE = "vae"
    DIT = "dit"


def main(
    out: Annotated[Path, typer.Argument(help="Where states, logs, sheets, the judge and the checkpoint go.")],
    icons: Annotated[
        Path, typer.Option(help="Where the two npm packages are, or are downloaded to; their hashes are checked.")
    ] = Path(".cache/icons"),
    preset: Annotated[
        PresetName, typer.Option(help="real: the embedded model. smoke: a tiny one, on shapes of its own, in a minute.")
    ] = PresetName.REAL,
    minutes: Annotated[
        float, typer.Option(min=0.01, help="For all of the training; filling the pools comes on top.")
    ] = 20.5,
    until: Annotated[
        StageName, typer.Option(help="Stop after this stage; with --resume another machine goes on, from the *.pt.")
    ] = StageName.DIT,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu; auto takes a GPU where there is one.")] = "auto",
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")] = True,
    save_minutes: Annotated[float, typer.Option(help="How often the state is saved and a sheet painted.")] = 4,
    resume: Annotated[
        bool, typer.Option(help="Go on with what is in OUT; what is done there is not done again.")
    ] = False,
) -> None:
    """Train the embedded model; the preset real is meant for one H200."""
    console = Console()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    claim(out, resume)
    options = Options(
        out=out,
        preset=PRESETS[preset],
        device=torch.device(device),
        minutes=minutes,
        until=until,
        compile=compile_ and device.startswith("cuda"),
        save_minutes=save_minutes,
        command=f"python -m ditpack.demo_model.train OUT --preset {preset} --minutes {minutes:g}",
    )
    with errors_told(console):
        train(shape_icons() if preset == "smoke" else published_icons(icons), options, console)


if __name__ == "__main__":
    typer.run(main)
