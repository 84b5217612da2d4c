"""``ditpack make-checkpoint``: write a checkpoint to test or measure with."""

from __future__ import annotations

import enum
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ditpack.errors import DitpackError


class Preset(enum.StrEnum):
    """The checkpoints that can be made."""

    TINY = "tiny"
    TINY_EDIT = "tiny-edit"
    TINY_EDIT_2509 = "tiny-edit-2509"
    TINY_EDIT_2511 = "tiny-edit-2511"
    TINY_MAMMOTH = "tiny-mammoth"
    QWEN_IMAGE = "qwen-image"


_TINY_PIPELINES = {
    Preset.TINY: "QwenImagePipeline",
    Preset.TINY_EDIT: "QwenImageEditPipeline",
    Preset.TINY_EDIT_2509: "QwenImageEditPlusPipeline",
    Preset.TINY_EDIT_2511: "QwenImageEditPlusPipeline",
}


def make_checkpoint(
    preset: Annotated[
        Preset,
        typer.Argument(help="tiny…: 2 layers, random weights, 1 MB. qwen-image: the published configs, no weights."),
    ],
    directory: Annotated[Path, typer.Argument(help="An empty or new folder.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same weights.")] = 0,
) -> None:
    """Write a checkpoint to test or measure with. Its pictures are noise."""
    start = time.monotonic()
    errors = Console(stderr=True)
    try:
        from transformers.utils import logging

        from ditpack.models.published import write_published_configs
        from ditpack.models.tiny import write_tiny_checkpoint
        from ditpack.models.tiny_mammoth import write_tiny_mammoth_checkpoint
    except ImportError as error:
        errors.print(f"[red]make-checkpoint needs the model libraries ({error}); install ditpack\\[backend][/red]")
        raise typer.Exit(1) from None
    logging.disable_progress_bar()
    try:
        if preset in _TINY_PIPELINES:
            zero_cond_t = preset is Preset.TINY_EDIT_2511
            write_tiny_checkpoint(directory, seed, pipeline=_TINY_PIPELINES[preset], zero_cond_t=zero_cond_t)
        elif preset is Preset.TINY_MAMMOTH:
            write_tiny_mammoth_checkpoint(directory, seed=seed)
        else:
            write_published_configs(directory)
    except (DitpackError, OSError) as error:
        errors.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    console = Console()
    console.print(f"Wrote the {preset} checkpoint (seed {seed}) in {time.monotonic() - start:.1f} s.", highlight=False)
    for path in sorted(directory.iterdir()):
        below = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
        console.print(f"  {path.name + ('/' if path.is_dir() else ''):<18}{below / 1024:>9.1f} KiB", highlight=False)
    console.print(f"  {'together':<18}{size / 1024:>9.1f} KiB", highlight=False)
    console.print(
        f"Serve it with: ditpack serve --checkpoint {directory}{' --weights random' * (preset is Preset.QWEN_IMAGE)}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
