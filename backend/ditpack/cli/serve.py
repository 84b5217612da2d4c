"""``ditpack serve``: a running server in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from ditpack.models.checkpoint import open_checkpoint
from ditpack.tritonserver.check import check_repository, this_machine
from ditpack.tritonserver.check.report import as_text, count
from ditpack.tritonserver.launch import TritonServer
from ditpack.tritonserver.launch.repository import find_repository
from ditpack.tritonserver.launch.server import EXIT_TIMEOUT, READY_TIMEOUT

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PROMPT = "a red apple on a blue background"


def serve(
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="A diffusers-layout directory; without it $DITPACK_CHECKPOINT, else the embedded model.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="stored; random = made up on the device, the checkpoint needs no weights; or auto.")
    ] = "auto",
    model_repository: Annotated[
        Path | None, typer.Option(help="What Triton loads, instead of ditpack's own repository.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="0 picks a free port, here and below.")] = 8000,
    grpc_port: Annotated[int, typer.Option()] = 8001,
    metrics_port: Annotated[int, typer.Option()] = 8002,
    log: Annotated[
        Path | None,
        typer.Option(help="Append tritonserver's log to this file; without it a temporary one.", show_default=False),
    ] = None,
    tritonserver: Annotated[
        Path | None,
        typer.Option(
            help="The binary; without it $DITPACK_TRITONSERVER, PATH, /opt/tritonserver, the embedded one.",
            show_default=False,
        ),
    ] = None,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds that loading may take.")] = READY_TIMEOUT,
    exit_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds that images in flight get to finish when the server is stopped.")
    ] = EXIT_TIMEOUT,
    watchdog: Annotated[
        bool, typer.Option(help="End, with exit code 1, when a model's process or an engine has died.")
    ] = True,
    triton_option: Annotated[
        list[str] | None,
        typer.Option(help="Passed to tritonserver as it is, --http-max-input-size=33554432 say; may be repeated."),
    ] = None,
) -> None:
    """Start tritonserver on a checkpoint and keep it running until Ctrl-C.

    What `ditpack check` says about the model repository comes first; an error there means no start.
    One Ctrl-C lets the images in flight finish; a second one ends it at once. When a part of the server has died, which
    tritonserver does not notice, everything ends with exit code 1, to be started again from outside.
    """
    began = time.monotonic()
    _check(model_repository, checkpoint, weights, tritonserver)
    server = TritonServer(
        model_repository,
        checkpoint,
        host,
        http_port,
        grpc_port,
        metrics_port,
        log,
        weights=weights,
        tritonserver=tritonserver,
        exit_timeout=exit_timeout,
        options=tuple(triton_option or ()),
    )
    for number in _STOPPING:
        signal.signal(number, _raise_stop)
    try:
        server.start()
        print(f"Starting tritonserver (process {server.pid}, log {server.log}) …", flush=True)
        server.wait_ready(ready_timeout)
        print(_how_to_call(server, time.monotonic() - began), flush=True)
        server.wait(watch=watchdog)
    except _Stop as stop:
        print(f"{signal.Signals(stop.number).name}: finishing what is in flight; once more ends it now …", flush=True)
        try:
            server.stop()
        except _Stop:
            _ignore_signals()
            server.kill()
        print("Stopped.", flush=True)
    finally:
        _ignore_signals()
        server.stop(timeout=0)


def _check(model_repository: Path | None, checkpoint: str | None, weights: str, tritonserver: Path | None) -> None:
    """Say what the linter finds; its errors end the start here, before a server spends minutes on them."""
    opened = open_checkpoint(checkpoint, weights)
    repository, machine = find_repository(model_repository), this_machine(tritonserver)
    findings = check_repository(repository, machine, str(opened.path), opened.weights)
    if findings:
        print(as_text(findings), file=sys.stderr, flush=True)
    errors = count(findings, "error")
    if errors:
        print(f"Not started: {errors} error{'s' if errors > 1 else ''} in the model repository.", file=sys.stderr)
        raise typer.Exit(1)


class _Stop(BaseException):
    """A signal asked ditpack to end; like KeyboardInterrupt, for all of them."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _raise_stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stop(number)


def _ignore_signals() -> None:
    """What follows is short and must not be left half done."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _how_to_call(server: TritonServer, seconds: float) -> str:
    lines = [
        f"Ready after {seconds:.1f} s: {', '.join(server.models)}",
        f"  HTTP {server.http_url}   gRPC {server.grpc_url}   metrics {server.metrics_url}",
    ]
    where = "" if server.http_url == "http://127.0.0.1:8000" else f" --server {server.http_url}"
    if "qwen_image" in server.models:
        decode = "import base64, json, sys; sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)['IMAGE']))"
        lines += [
            "Ask for an image:",
            f'  ditpack generate "{_PROMPT}" -o apple.png{where}',
            "or, from anywhere:",
            f"  curl -s {server.http_url}/v2/models/qwen_image/generate \\",
            f"""    -d '{{"PROMPT": "{_PROMPT}", "RESPONSE_FORMAT": "b64_json"}}' \\""",
            f'    | python3 -c "{decode}" > apple.png',
        ]
    if "qwen_image_edit" in server.models:
        lines += ["Edit one:", f'  ditpack edit apple.png "make it two" -o two.png{where}']
    if "mammoth_moda2" in server.models:
        lines.append(
            "mammoth_moda2 takes what the autoregressive stage made of a prompt; docs/wire.md has its tensors."
        )
    return "\n".join([*lines, f"Ctrl-C stops it (process {os.getpid()})."])
