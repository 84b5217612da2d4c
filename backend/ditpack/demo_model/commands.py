"""What the commands of the embedded model share: a folder to leave things in, and how they say what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from ditpack.errors import DitpackError


def claim(out: Path, resume: bool) -> None:
    """Make ``out``.

    Raises:
        typer.BadParameter: something is in it, and ``resume`` does not say to go on with that.
    """
    if out.exists() and any(out.iterdir()) and not resume:
        raise typer.BadParameter(f"{out} is not empty; --resume goes on with it", param_hint="OUT")
    out.mkdir(parents=True, exist_ok=True)


@contextmanager
def errors_told(console: Console) -> Iterator[None]:
    """Inside, a ``DitpackError`` ends the command with its message and exit code 1."""
    try:
        yield
    except DitpackError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
