"""``ditpack demo``: a dozen prompts of different sizes and lengths, denoised together by one engine."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import numpy as np
import typer
from PIL.Image import Image
from rich.console import Console

from ditpack_client.async_client import AsyncClient
from ditpack_client.batch import describe
from ditpack_client.cli import print_errors
from ditpack_client.contact_sheet import Entry, contact_sheet, side_by_side
from ditpack_client.errors import GenerationError
from ditpack_client.metrics import EngineWatch
from ditpack_client.naming import slug
from ditpack_client.progress import Board
from ditpack_client.result import ImageResult
from ditpack_client.wire import ImageRequest

if TYPE_CHECKING:
    from ditpack.tritonserver.launch import TritonServer

_READY_SECONDS = 300.0
_IMAGE_SECONDS = 600.0

# Subjects and sizes that the embedded checkpoint has learnt (emoji scenes): prompt, width, height, steps, seed.
_SCENES = (
    ("two pink hearts, glossy style", 160, 96, 20, 2),
    ("a red apple on a blue background", 96, 96, 16, 7),
    ("three cherries on a white background", 144, 112, 24, 13),
    ("two pig noses on a black background", 192, 64, 18, 1),
    ("a cactus on a yellow background, flat style", 112, 144, 22, 6),
    ("face with medical mask on a yellow background, glossy style", 128, 128, 28, 4),
    ("a smiling face with halo, flat style", 128, 128, 26, 9),
    ("four musical notes, glossy style", 128, 128, 21, 5),
    ("a sun above a house", 96, 160, 25, 6),
    ("four eggs on a brown background", 128, 128, 12, 2),
    ("a toolbox on a teal background, glossy style", 128, 128, 14, 3),
    ("a crescent moon on a black background", 64, 96, 15, 8),
)

# What is then made of pictures above, where the server's checkpoint edits: instruction, places in _SCENES.
_EDITS = (
    ("change the background to green", (0,)),
    ("make it two", (6,)),
    ("add a sun on the right", (6,)),
    ("remove the house", (8,)),
    ("swap top and bottom", (8,)),
    ("combine both pictures", (10, 5)),
)


def demo_requests() -> list[ImageRequest]:
    """What the demo asks for: sizes, step counts and seeds all mixed."""
    return [
        {"prompt": prompt, "width": width, "height": height, "num_inference_steps": steps, "seed": seed}
        for prompt, width, height, steps, seed in _SCENES
    ]


def demo(
    out: Annotated[Path, typer.Option(help="Directory for the images, the contact sheet and the server's log.")] = Path(
        "demo"
    ),
    server: Annotated[
        str | None,
        typer.Option(help="Use this running server, such as localhost:8000, instead of starting the embedded one."),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="That server's metrics address; otherwise port 8002 of its host.")
    ] = None,
    alone: Annotated[
        bool, typer.Option(help="Afterwards make every image again, one at a time, and compare times and pixels.")
    ] = True,
) -> None:
    """Serve the embedded model, ask for a dozen different images at once and lay them out on one sheet."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {out}: {error.strerror}", param_hint="--out") from None
    with ExitStack() as stack:
        if server is None:
            started = _start_server(stack, console, out / "server.log")
            server, metrics = started.http_url, started.metrics_url
        try:
            client = AsyncClient(server)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--server") from None
        watch = EngineWatch(metrics or f"http://{urlsplit('//' + client.address.server).hostname}:8002")
        try:
            asyncio.run(_show(client, watch, out, console, alone))
        except GenerationError as error:
            print_errors([("", error.message)], images=1)
            raise typer.Exit(1) from None


def _start_server(stack: ExitStack, console: Console, log: Path) -> TritonServer:
    # Only here does the client need the server's half of the package.
    from ditpack.tritonserver.launch import TritonServer

    console.print(f"starting the embedded server (log: {log}) …")
    began = time.monotonic()
    server = stack.enter_context(TritonServer(http_port=0, grpc_port=0, metrics_port=0, log=log))
    server.wait_ready(_READY_SECONDS)
    console.print(f"ready at {server.http_url} after {time.monotonic() - began:.1f} s")
    return server


async def _show(client: AsyncClient, watch: EngineWatch, out: Path, console: Console, alone: bool) -> None:
    requests = demo_requests()
    async with client:
        # The first forward of a process is slow whatever it carries; nobody's time should include it.
        await client.generate("warm up", width=64, height=64, num_inference_steps=2, timeout=_IMAGE_SECONDS)
        await watch.begin()
        console.print(f"{len(requests)} prompts, sent at once:")
        results, seconds = await _at_once(client, requests, watch, out, console)
        _sheet(results, watch).save(out / "contact-sheet.png")
        _report_steps(results, watch, console)
        await _edits(client, results, out, console)
        if alone:
            await _compare(client, requests, results, seconds, console)
    console.print(f"{len(results)} images and contact-sheet.png are in {out}/")


async def _at_once(
    client: AsyncClient, requests: list[ImageRequest], watch: EngineWatch, out: Path, console: Console
) -> tuple[list[ImageResult], float]:
    """The images in the order of ``requests``, and the seconds that all took together."""
    results: dict[int, ImageResult] = {}
    began = time.monotonic()
    async with watch.polling():
        with Board(console, [request["prompt"] for request in requests], watch.line) as board:
            async for index, outcome in client.generate_many(
                requests, concurrency=len(requests), timeout=_IMAGE_SECONDS
            ):
                if isinstance(outcome, GenerationError):
                    board.failed(index, outcome.message)
                    raise outcome
                board.done(index, describe(outcome))
                outcome.save(out / f"{index + 1:02d}-{slug(requests[index]['prompt'])}.png")
                results[index] = outcome
            seconds = time.monotonic() - began
    return [results[index] for index in range(len(requests))], seconds


def _sheet(results: list[ImageResult], watch: EngineWatch) -> Image:
    entries = [
        Entry(
            result.image,
            str(result.settings()["prompt"]),
            f"{result.image.width}x{result.image.height} · {result.steps} steps · seed {result.seed}",
        )
        for result in results
    ]
    subtitle = f"{sum(result.steps for result in results)} denoising steps"
    if watch.steps:
        subtitle += f" in {watch.steps} packed forwards"
    return contact_sheet(entries, title=f"ditpack: {len(results)} images at once, one engine", subtitle=subtitle)


async def _edits(client: AsyncClient, results: list[ImageResult], out: Path, console: Console) -> None:
    """Edits of some of the images, all at once, on a sheet of their own; nothing where the checkpoint cannot edit."""
    before = [[results[place].image for place in places] for _, places in _EDITS]
    try:
        edited = await asyncio.gather(
            *(
                client.edit(instruction, images, num_inference_steps=20, seed=index, timeout=_IMAGE_SECONDS)
                for index, ((instruction, _), images) in enumerate(zip(_EDITS, before, strict=True))
            )
        )
    except GenerationError as error:
        if error.code != "NOT_FOUND":  # no such model
            raise
        return
    entries = [
        Entry(side_by_side([*images, result.image]), instruction, f"{len(images)} before, 1 after · seed {result.seed}")
        for (instruction, _), images, result in zip(_EDITS, before, edited, strict=True)
    ]
    contact_sheet(entries, title=f"ditpack: {len(_EDITS)} edits at once", columns=2).save(out / "edits.png")
    console.print(f"edits: {len(_EDITS)}, at once too, on edits.png")


def _report_steps(results: list[ImageResult], watch: EngineWatch, console: Console) -> None:
    steps, shared = sum(result.steps for result in results), sum(result.shared_steps for result in results)
    console.print(f"images: {steps} denoising steps, {shared} of them in a pack with other images")
    if watch.steps:
        console.print(
            f"engine: {watch.steps} forwards did it, {watch.shared} of them shared, "
            f"with {watch.requests / watch.steps:.1f} images in each on average"
        )


async def _compare(
    client: AsyncClient, requests: list[ImageRequest], together: list[ImageResult], seconds: float, console: Console
) -> None:
    """Every image again with the engine to itself: what packing saves, and that it changes nothing."""
    console.print("the same images one at a time, to compare …")
    total, differences = 0.0, []
    for request, packed in zip(requests, together, strict=True):
        began = time.monotonic()
        result = await client.generate(**request, timeout=_IMAGE_SECONDS)
        total += time.monotonic() - began
        pixels = np.asarray(result.image, dtype=np.int16)
        differences.append(int(np.abs(pixels - np.asarray(packed.image, dtype=np.int16)).max()))
    console.print(f"time: {seconds:.1f} s at once, {total:.1f} s one at a time: {total / seconds:.2f} times as long")
    same = sum(difference == 0 for difference in differences)
    console.print(
        f"pixels: {same} of {len(together)} images are the same to the last bit; "
        f"the largest difference is {max(differences)} of 255"
    )
