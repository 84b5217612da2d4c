"""The ``ditpack`` command. Each subcommand's module is imported only when it is the one asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import ditpack
from ditpack.errors import DitpackError


@dataclass(frozen=True, slots=True)
class Command:
    """``function`` is "module:name"; ``help`` is its line in ``ditpack --help``."""

    function: str
    help: str

    def load(self) -> Callable[..., Any]:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


COMMANDS = {
    "serve": Command("ditpack.cli.serve:serve", "Start tritonserver on a checkpoint (the embedded one by default)."),
    "check": Command("ditpack.cli.check:check", "Say what is wrong with a model repository, before a server does."),
    "probe": Command("ditpack.cli.probe:probe", "Say whether a server is ready, alive or drained; for health checks."),
    "generate": Command("ditpack_client.cli:generate", "Ask a running server for images."),
    "edit": Command("ditpack_client.cli:edit", "Ask a running server to edit images."),
    "bench": Command("ditpack_client.bench.command:bench", "Load-test a running server with perf_analyzer."),
    "demo": Command("ditpack_client.demo:demo", "Serve the embedded model and make a sheet of images with it."),
    "make-checkpoint": Command("ditpack.cli.make_checkpoint:make_checkpoint", "Write a small random checkpoint."),
}

# What ditpack[server] brings and a plain installation lacks.
_SERVER_MODULES = {
    *("accelerate", "diffusers", "pydantic", "pytriton", "safetensors", "tokenizers", "torch", "transformers"),
}


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The command line; only the subcommand that ``arguments`` name is imported, the rest is there for --help."""
    app = typer.Typer(
        name="ditpack",
        help="Diffusion transformers on NVIDIA Triton, packed at every denoising step.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    app.callback()(_options)
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, command in COMMANDS.items():
        if name == wanted:
            app.command(name)(command.load())
        else:
            app.command(name, help=command.help)(_not_loaded)
    return app


def main() -> None:
    """The console script. Errors that are ours end in at most two lines and exit code 1, never in a traceback."""
    try:
        build_app(sys.argv[1:])()
    except DitpackError as error:
        lines = str(error).splitlines() or [type(error).__name__]
        print(f"error: {lines[0]}", *lines[1:2], sep="\n", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _SERVER_MODULES:
            raise
        print(f"error: {missing} is not installed.", file=sys.stderr)
        print('This needs more than the client: pip install "ditpack[server]"', file=sys.stderr)
        sys.exit(1)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"ditpack {ditpack.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _not_loaded() -> None:
    """Stands in --help for a subcommand that was not asked for."""
    raise AssertionError("a subcommand ran that was not loaded")
