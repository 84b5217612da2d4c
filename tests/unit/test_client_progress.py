"""`ditpack generate` and `ditpack edit` with a server that streams: progress, previews, retries, Ctrl-C."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from fake_kserve import Painter
from PIL import Image
from rich.console import Console
from test_client_cli import run

from ditpack_client import Event, Queued, Retrying, Step, call
from ditpack_client.cli import edit, generate
from ditpack_client.progress import Board

SOON = 20.0


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "teal").save("photo.jpg")


@pytest.fixture
def painter() -> Painter:
    return Painter(streams=True)


def test_generate_streams_and_edit_does_not(url: str, painter: Painter) -> None:
    result = run(
        generate, "a kite", "a boat", "--server", url, "-o", "{prompt}.png", "--deadline", "1.5", "--priority", "1"
    )
    assert result.exit_code == 0, result.output
    assert run(edit, "photo.jpg", "make it snow", "--server", url, "--deadline", "0.0001").exit_code == 2
    result = run(edit, "photo.jpg", "make it snow", "--server", url, "-o", "snow.png", "--deadline", "0.0015")
    assert result.exit_code == 0, result.output
    assert painter.models == ["qwen_image_stream"] * 2 + ["qwen_image_edit"]
    assert [request["DEADLINE_MS"][2] for request in painter.requests] == [1500, 1500, 2]
    assert [request["PRIORITY"][2] for request in painter.requests if "PRIORITY" in request] == [1, 1]
    assert all("PREVIEW_EVERY" not in request for request in painter.requests)
    assert {path.name for path in Path().iterdir()} == {"a-kite.png", "a-boat.png", "snow.png", "photo.jpg"}


def test_elsewhere_than_on_a_terminal_there_is_one_plain_line_an_image(url: str) -> None:
    result = run(generate, "a kite", "--server", url, "--seed", "7", "-o", "kite.png")
    assert result.stdout == "kite.png  64x48  seed 7  50 steps  queue 2 ms, denoise 1.2 s  a kite\n"
    assert result.stderr == ""


def test_previews(url: str, painter: Painter) -> None:
    arguments = ["--steps", "6", "--previews", "looks", "--preview-every", "3", "--server", url, "-o", "all/"]
    assert run(generate, "a kite", "a boat", *arguments).exit_code == 0
    names = sorted(path.name for path in Path("looks").iterdir())
    assert names == ["1-a-kite-003.jpg", "1-a-kite-006.jpg", "2-a-boat-003.jpg", "2-a-boat-006.jpg"]
    with Image.open("looks/1-a-kite-003.jpg") as image:
        assert (image.format, image.size) == ("JPEG", (8, 6))
    assert run(generate, "a kite", "--previews", "photo.jpg", "--server", url).exit_code == 2
    assert len(painter.requests) == 2


def test_a_full_server_is_tried_again_and_it_says_so(
    url: str, painter: Painter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "_FIRST_S", 0.02)
    for command in ([generate, "a kite"], [edit, "photo.jpg", "a kite"]):
        painter.refusals = 2
        result = run(*command, "--server", url)
        assert result.exit_code == 0, result.output
        line = r"full: 4 requests have been waiting for 1 s; trying again in 0\.\d s \(a kite\)\n"
        assert re.fullmatch(line * 2, result.stderr)
    painter.refusals = 2
    result = run(generate, "a kite", "--server", url, "--retries", "1")
    assert result.exit_code == 1
    assert result.stderr.endswith("\nerror: full: 4 requests have been waiting for 1 s\n")


@pytest.mark.parametrize("scheme", ["", "grpc://"])
def test_no_server_is_not_tried_again(scheme: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for command in ([generate, "a kite"], [edit, "photo.jpg", "a kite"]):
        result = run(*command, "--server", scheme + address)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert result.stderr == f"error: no server at {address}: start one with `ditpack serve`\n"


def test_an_edit_that_takes_too_long_is_cancelled(url: str, painter: Painter) -> None:
    result = run(edit, "photo.jpg", "endless", "--server", url, "--timeout", "0.3")
    assert (result.exit_code, "within 0.3 s" in result.stderr) == (1, True)
    assert painter.cancelled == set(painter.ids)


# Ctrl-C.


def start(command: str, *arguments: str) -> subprocess.Popen[str]:
    # A shell's background jobs, and so perhaps these tests, ignore SIGINT, and what they start would too.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += f"import typer; from ditpack_client.cli import {command} as run; typer.run(run)"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=SOON)


def wait_until_asked(painter: Painter, count: int) -> None:
    ends = time.monotonic() + 3 * SOON  # a Python has to start
    while len(painter.ids) < count:
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize("command", [["generate"], ["edit", "photo.jpg"]])
def test_ctrl_c_cancels_on_the_server(url: str, painter: Painter, command: list[str]) -> None:
    process = start(*command, "endless", "endless", "endless", "a kite", "--server", url, "-o", "out/")
    wait_until_asked(painter, 4)
    while not Path("out/a-kite-4242.png").exists():
        time.sleep(0.01)
    output, errors = interrupt(process)
    assert (process.returncode, errors) == (130, "cancelled on the server: 3 of 3\n")
    assert output.count("\n") == 1  # the kite
    assert len(painter.cancelled) == 3
    assert painter.cancelled < set(painter.ids)


def test_ctrl_c_where_the_server_cannot_cancel(url: str, painter: Painter) -> None:
    painter.served = ("qwen_image",)
    process = start("generate", "endless", "--server", url)
    wait_until_asked(painter, 1)
    _, errors = interrupt(process)
    assert process.returncode == 130
    assert errors.startswith("cancelled on the server: 0 of 1 (Request for unknown model: ")


def test_ctrl_c_with_what_has_not_arrived(url: str, painter: Painter) -> None:
    painter.elsewhere = True
    process = start("generate", "endless", "--server", url)
    wait_until_asked(painter, 1)
    _, errors = interrupt(process)
    expected = (
        "cancelled on the server: 0 of 1 (the others had just ended, or are refused when they reach the engine)\n"
    )
    assert (process.returncode, errors) == (130, expected)


def test_a_second_ctrl_c_ends_at_once(url: str, painter: Painter) -> None:
    """While the server is still busy with the first."""
    painter.answering.clear()
    process = start("generate", "endless", "--server", url)
    wait_until_asked(painter, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    output, errors = interrupt(process)
    painter.answering.set()
    assert (process.returncode, output, errors) == (130, "", "")


# The board.


def board_line(event: Event) -> str:
    """The last that a terminal shows of one image, without its control sequences."""
    console = Console(file=None, width=120, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    with console.capture() as captured, Board(console, ["a kite"]) as board:
        board.update(0, event)
    shown = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", captured.get())
    return [line for line in re.split(r"[\r\n]+", shown) if line.strip()][-1].rstrip()


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Queued("id", None), "queued  0.0 s"),
        (Queued("id", 3), "queued  number 3 in the queue"),
        (Step("id", 7, 50, 0.21, 9.03), "step  7 of 50  210 ms a step  9 s left"),
        (Step("id", 50, 50, 1.25, 0.0), "step 50 of 50  1.2 s a step  decoding"),
        (Step("id", 1, 200, 0.5, 99.5), "step   1 of 200  500 ms a step  1 min 40 s left"),
        (Retrying("id", 1.44, "full: 4 wait"), "full: 4 wait; trying again in 1.4 s"),
    ],
)
def test_board_says_where_an_image_is(event: Event, text: str) -> None:
    line = board_line(event)
    assert line.startswith("a kite")
    assert line.endswith(text)


def test_bars_are_as_long_as_what_is_done() -> None:
    bars = [board_line(Step("id", step, 40, 0.1, 1.0)).count("━") for step in (0, 20, 40)]
    assert bars == [0, 10, 20]
