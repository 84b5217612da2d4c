"""``ditpack generate`` and ``ditpack edit``: prompts, or images and prompts, in; files out."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from ditpack_client.address import Protocol
from ditpack_client.async_client import AsyncClient
from ditpack_client.batch import Batch
from ditpack_client.call import DEFAULT_TIMEOUT
from ditpack_client.errors import GenerationError
from ditpack_client.naming import Naming
from ditpack_client.wire import EditRequest, ImageRequest, image_bytes

_RETRIES = 5
_INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


class ProtocolName(StrEnum):
    http = "http"
    grpc = "grpc"


class FileFormat(StrEnum):
    png = "png"
    jpeg = "jpeg"
    webp = "webp"


Prompts = Annotated[
    list[str], typer.Argument(help="What to paint; several prompts are sent at once.", show_default=False)
]
Size = Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels, multiples of 16, such as 96x64.")]
Seed = Annotated[int | None, typer.Option(help="The first image's seed; drawn by the server when left out.")]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.")]
Cfg = Annotated[float | None, typer.Option(help="true_cfg_scale: how closely to follow the prompt; 1 = no guidance.")]
Negative = Annotated[str | None, typer.Option(help="What to keep out of the image.")]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        help="A file, a directory, or a pattern with {index}, {prompt}, {seed}. "
        "Several images for one plain file name are numbered. The default is PROMPT-SEED.png.",
        show_default=False,
    ),
]
Count = Annotated[int, typer.Option(min=1, max=1000, help="Images a prompt, with the seeds SEED, SEED+1, …")]
Server = Annotated[str, typer.Option(envvar="DITPACK_SERVER", help="Address, such as host:8000 or grpc://host:8001.")]
Carrier = Annotated[ProtocolName | None, typer.Option(help="Needed only where --server does not say; otherwise http.")]
Format = Annotated[
    FileFormat | None,
    typer.Option(help="File format; otherwise that of the output's name, or png. Only png files keep the settings."),
]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds to wait for each image, the server's queue included.")]
Deadline = Annotated[
    float | None,
    typer.Option(min=0.001, max=2_000_000, help="Seconds after which the server drops an image that is not done."),
]
Priority = Annotated[
    int | None, typer.Option(min=1, max=3, help="1 goes before 2, and 2 before 3, on a busy server; otherwise 2.")
]
Retries = Annotated[
    int, typer.Option(min=0, help="How often to try again, after longer and longer waits, when the server is full.")
]
Metadata = Annotated[
    bool,
    typer.Option(help="Keep prompt, size, steps, guidance and seed in PNG files, as the text chunk 'parameters'."),
]


def generate(
    prompts: Prompts,
    size: Size = None,
    seed: Seed = None,
    steps: Steps = None,
    cfg: Cfg = None,
    negative: Negative = None,
    output: Output = None,
    count: Count = 1,
    server: Server = "localhost:8000",
    protocol: Carrier = None,
    format: Format = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    deadline: Deadline = None,
    priority: Priority = None,
    retries: Retries = _RETRIES,
    previews: Annotated[
        Path | None,
        typer.Option(help="Directory for small previews, PROMPT-STEP.jpg, while the images are made."),
    ] = None,
    preview_every: Annotated[int, typer.Option(min=1, help="Steps between two previews.")] = 5,
    metadata: Metadata = True,
) -> None:
    """Ask a ditpack server for images and write them to files. Ctrl-C cancels them on the server."""
    requests = _requests(prompts, size, seed, steps, cfg, negative, count)
    _ask(
        requests,
        output,
        server,
        protocol,
        format,
        timeout,
        deadline,
        priority,
        retries,
        metadata,
        previews,
        preview_every if previews is not None else 0,
    )


def edit(
    image: Annotated[Path, typer.Argument(help="The image to edit: PNG, JPEG or WebP.", show_default=False)],
    prompts: Annotated[
        list[str], typer.Argument(help="What to do to it; several prompts are sent at once.", show_default=False)
    ],
    more: Annotated[
        list[Path] | None,
        typer.Option(
            "--image", help="A second and a third image, where the checkpoint takes them.", show_default=False
        ),
    ] = None,
    size: Size = None,
    seed: Seed = None,
    steps: Steps = None,
    cfg: Cfg = None,
    negative: Negative = None,
    output: Output = None,
    count: Count = 1,
    server: Server = "localhost:8000",
    protocol: Carrier = None,
    format: Format = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    deadline: Deadline = None,
    priority: Priority = None,
    retries: Retries = _RETRIES,
    metadata: Metadata = True,
) -> None:
    """Ask a ditpack server to edit images and write what it makes to files. The size is that of the last image."""
    try:
        images = [image_bytes(path) for path in (image, *(more or []))]
    except GenerationError as error:
        raise typer.BadParameter(error.message) from None
    requests: list[ImageRequest] = [
        EditRequest(images=images, **request) for request in _requests(prompts, size, seed, steps, cfg, negative, count)
    ]
    _ask(requests, output, server, protocol, format, timeout, deadline, priority, retries, metadata)


def _ask(
    requests: list[ImageRequest],
    output: str | None,
    server: str,
    protocol: ProtocolName | None,
    format: FileFormat | None,
    timeout: float,
    deadline: float | None,
    priority: int | None,
    retries: int,
    metadata: bool,
    previews: Path | None = None,
    preview_every: int = 0,
) -> None:
    try:
        naming = Naming(output, format and format.value, len(requests))
        client = AsyncClient(server, cast(Protocol | None, protocol and protocol.value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _make_writable(naming.directory, "--output")
    if previews is not None:
        _make_writable(previews, "--previews")
    for request in requests:
        request["output_format"] = naming.output_format
        request["deadline_ms"] = None if deadline is None else math.ceil(1000 * deadline)
        request["priority"] = priority
    batch = Batch(client, requests, naming, timeout, retries, metadata, previews, preview_every)
    try:
        errors = asyncio.run(batch.run())
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
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


def _make_writable(directory: Path, option: str) -> None:
    """Refuse an output place before any image is paid for."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {directory}: {error.strerror}", param_hint=option) from None
    if not os.access(directory, os.W_OK):
        raise typer.BadParameter(f"cannot write in {directory}", param_hint=option)


def print_errors(errors: list[tuple[str, str]], images: int) -> None:
    """One line on stderr for each message, with how many of the ``images`` it cost. ``errors``: (prompt, message)."""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    for message, count in Counter(message for _, message in errors).items():
        prompt = next(prompt for prompt, told in errors if told == message)
        which = f" ({count} images)" if count > 1 else f" ({prompt[:60]})" if images > 1 else ""
        console.print(f"error: {message}{which}")
