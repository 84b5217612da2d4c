"""``ditpack generate``: prompts in, files out."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from ditpack_client.address import Protocol
from ditpack_client.client import DEFAULT_TIMEOUT, AsyncClient
from ditpack_client.errors import GenerationError
from ditpack_client.naming import Naming
from ditpack_client.progress import Board, milliseconds
from ditpack_client.result import ImageResult
from ditpack_client.wire import ImageRequest


class ProtocolName(StrEnum):
    http = "http"
    grpc = "grpc"


class FileFormat(StrEnum):
    png = "png"
    jpeg = "jpeg"
    webp = "webp"


def generate(
    prompts: Annotated[
        list[str], typer.Argument(help="What to paint; several prompts are sent at once.", show_default=False)
    ],
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels, multiples of 16, such as 96x64.")] = None,
    seed: Annotated[int | None, typer.Option(help="The first image's seed; drawn by the server when left out.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    cfg: Annotated[
        float | None, typer.Option(help="true_cfg_scale: how closely to follow the prompt; 1 = no guidance.")
    ] = None,
    negative: Annotated[str | None, typer.Option(help="What to keep out of the image.")] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="A file, a directory, or a pattern with {index}, {prompt}, {seed}. "
            "Several images for one plain file name are numbered. The default is PROMPT-SEED.png.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=1000, help="Images a prompt, with the seeds SEED, SEED+1, …")] = 1,
    server: Annotated[
        str, typer.Option(envvar="DITPACK_SERVER", help="Address, such as host:8000 or grpc://host:8001.")
    ] = "localhost:8000",
    protocol: Annotated[
        ProtocolName | None, typer.Option(help="Needed only where --server does not say; otherwise http.")
    ] = None,
    format: Annotated[
        FileFormat | None,
        typer.Option(
            help="File format; otherwise that of the output's name, or png. Only png files keep the settings."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds to wait for each image, the server's queue included.")
    ] = DEFAULT_TIMEOUT,
    metadata: Annotated[
        bool,
        typer.Option(help="Keep prompt, size, steps, guidance and seed in PNG files, as the text chunk 'parameters'."),
    ] = True,
) -> None:
    """Ask a ditpack server for images and write them to files."""
    requests = _requests(prompts, size, seed, steps, cfg, negative, count)
    try:
        naming = Naming(output, format and format.value, len(requests))
        client = AsyncClient(server, cast(Protocol | None, protocol and protocol.value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _make_writable(naming.directory)
    for request in requests:
        request["output_format"] = naming.output_format
    errors = asyncio.run(_run(client, requests, naming, timeout, metadata))
    if errors:
        print_errors(errors, len(requests))
        raise typer.Exit(1)


def parse_size(text: str) -> tuple[int, int]:
    """ "96x64" → (96, 64). Whether the server serves that size is for the server to say."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*[xX×]\s*(\d{1,6})\s*", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not WIDTHxHEIGHT, such as 96x64", param_hint="--size")
    return int(match[1]), int(match[2])


def _requests(
    prompts: list[str],
    size: str | None,
    seed: int | None,
    steps: int | None,
    cfg: float | None,
    negative: str | None,
    count: int,
) -> list[ImageRequest]:
    width, height = parse_size(size) if size is not None else (None, None)
    return [
        {
            "prompt": prompt,
            "negative_prompt": negative,
            "width": width,
            "height": height,
            "num_inference_steps": steps,
            "true_cfg_scale": cfg,
            "seed": None if seed is None else seed + offset,
        }
        for prompt in prompts
        for offset in range(count)
    ]


def _make_writable(directory: Path) -> None:
    """Refuse an output place before any image is paid for."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {directory}: {error.strerror}", param_hint="--output") from None
    if not os.access(directory, os.W_OK):
        raise typer.BadParameter(f"cannot write in {directory}", param_hint="--output")


async def _run(
    client: AsyncClient, requests: list[ImageRequest], naming: Naming, timeout: float, metadata: bool
) -> list[tuple[str, str]]:
    """Make every image and return (prompt, message) of those that failed."""
    errors = []
    prompts = [request["prompt"] for request in requests]
    async with client:
        with Board(Console(), prompts) as board:
            async for index, outcome in client.generate_many(requests, concurrency=len(requests), timeout=timeout):
                try:
                    if isinstance(outcome, GenerationError):
                        raise outcome
                    path = naming.path(index + 1, prompts[index], outcome.seed)
                    outcome.save(path, metadata=metadata)
                except (GenerationError, OSError) as error:
                    message = _message(error, naming.directory)
                    errors.append((prompts[index], message))
                    board.failed(index, message)
                else:
                    board.done(index, f"{path}  {describe(outcome)}")
    return errors


def _message(error: GenerationError | OSError, directory: Path) -> str:
    if isinstance(error, GenerationError):
        return error.message
    return f"cannot write {error.filename or directory}: {error.strerror or error}"


def print_errors(errors: list[tuple[str, str]], images: int) -> None:
    """One line on stderr for each message, with how many of the ``images`` it cost. ``errors``: (prompt, message)."""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    for message, count in Counter(message for _, message in errors).items():
        prompt = next(prompt for prompt, told in errors if told == message)
        which = f" ({count} images)" if count > 1 else f" ({prompt[:60]})" if images > 1 else ""
        console.print(f"error: {message}{which}")


def describe(result: ImageResult) -> str:
    """Size, seed and times of an image, in one line."""
    times = f"queue {milliseconds(result.queue_ms)}, denoise {milliseconds(result.denoise_ms)}"
    return f"{result.image.width}x{result.image.height}  seed {result.seed}  {result.steps} steps  {times}"
