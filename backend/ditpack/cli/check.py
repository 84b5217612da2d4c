"""``ditpack check``: lint a model repository before a server sees it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ditpack.tritonserver.check import check_repository, this_machine
from ditpack.tritonserver.check.report import as_json, as_text, count
from ditpack.tritonserver.launch.repository import find_repository
from ditpack.tritonserver.launch.serve_error import ServeError


def check(
    repository: Annotated[
        Path | None, typer.Argument(help="A model repository; without it ditpack's own.", show_default=False)
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="What serve will be given; without it $DITPACK_CHECKPOINT, else the embedded model."),
    ] = None,
    weights: Annotated[str, typer.Option(help="Likewise: stored, random or auto.")] = "auto",
    configs_only: Annotated[
        bool, typer.Option(help="Look at the repository alone, not at checkpoints, GPUs, memory and the tritonserver.")
    ] = False,
    gpus: Annotated[int | None, typer.Option(min=0, help="The GPUs of the machine it is meant for.")] = None,
    gpu_gib: Annotated[float | None, typer.Option(min=0, help="The memory of each of them, in GiB.")] = None,
    tritonserver: Annotated[Path | None, typer.Option(help="The binary it is meant for, as with serve.")] = None,
    strict: Annotated[bool, typer.Option(help="Warnings count as errors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text, for CI.")] = False,
) -> None:
    """Say what is wrong with a model repository, where, and what to do about it, without starting a server.

    Exit code 0: nothing wrong (or warnings alone). 1: errors. 2: there is no repository to look at.
    """
    try:
        path = find_repository(repository)
    except ServeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    shown = Path(os.path.relpath(path)) if not os.path.relpath(path).startswith("..") else path
    machine = None if configs_only else this_machine(tritonserver, gpus, gpu_gib)
    findings = check_repository(path, machine, checkpoint, weights)
    errors, warnings = count(findings, "error"), count(findings, "warning")
    if json:
        typer.echo(as_json(path, findings))
    else:
        if findings:
            typer.echo(as_text(findings))
        typer.echo(f"{shown}: {_counted(errors, 'error')}, {_counted(warnings, 'warning')}")
    if errors or (strict and warnings):
        raise typer.Exit(1)


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
