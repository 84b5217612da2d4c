"""`ditpack generate` and the demo's parts, against the fake server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from fake_kserve import Painter, serve_grpc, serve_http
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from ditpack_client import demo as demo_module
from ditpack_client.cli import generate
from ditpack_client.demo import demo, demo_requests
from ditpack_client.metrics import EngineWatch, read_metrics
from ditpack_client.progress import Board
from ditpack_client.result import read_settings


def run(command: Any, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def painter() -> Painter:
    return Painter()


@pytest.fixture
def server(painter: Painter) -> Iterator[str]:
    with serve_http(painter) as address:
        yield address


def test_one_prompt_to_one_file(server: str, painter: Painter) -> None:
    options = {"--size": "96x64", "--seed": "7", "--steps": "20", "--cfg": "2.5", "--negative": "blur"}
    result = run(generate, "a red kite", *chain(*options.items()), "-o", "out/kite.png", "--server", server)
    assert result.exit_code == 0, result.output
    assert {name: value for name, (_, _, value) in painter.requests[0].items()} == {
        "PROMPT": b"a red kite",
        "NEGATIVE_PROMPT": b"blur",
        "WIDTH": 96,
        "HEIGHT": 64,
        "NUM_INFERENCE_STEPS": 20,
        "TRUE_CFG_SCALE": 2.5,
        "SEED": 7,
        "OUTPUT_FORMAT": b"png",
    }
    with Image.open("out/kite.png") as image:
        assert image.size == (96, 64)
    settings = read_settings("out/kite.png")
    assert settings is not None
    assert (settings["prompt"], settings["seed"], settings["negative_prompt"]) == ("a red kite", 7, "blur")
    assert "out/kite.png" in result.stdout
    assert "seed 7" in result.stdout
    assert "denoise 1.2 s" in result.stdout


def test_nothing_but_the_prompt_and_format_is_sent_by_default(server: str, painter: Painter) -> None:
    assert run(generate, "a kite", "--server", server).exit_code == 0
    assert set(painter.requests[0]) == {"PROMPT", "OUTPUT_FORMAT"}
    assert [str(path) for path in Path().iterdir()] == ["a-kite-4242.png"]


def test_several_prompts_and_counts_go_at_once(server: str, painter: Painter) -> None:
    result = run(generate, "slow", "slow", "--count", "3", "--seed", "5", "--server", server)
    assert result.exit_code == 0, result.output
    assert painter.at_once == 6
    assert sorted(path.name for path in Path().iterdir()) == sorted(
        ["slow-5.png", "slow-6.png", "slow-7.png", "slow-5-2.png", "slow-6-2.png", "slow-7-2.png"]
    )


def test_over_grpc_without_metadata(painter: Painter) -> None:
    with serve_grpc(painter) as address:
        assert run(generate, "a kite", "--server", address, "-o", "a.png", "--no-metadata").exit_code == 0
        bare = address.removeprefix("grpc://")
        assert run(generate, "a kite", "--server", bare, "--protocol", "grpc", "-o", "b.png").exit_code == 0
    assert read_settings("a.png") is None
    assert read_settings("b.png") is not None


@pytest.mark.parametrize(("arguments", "name"), [("-o a.webp", "a.webp"), ("--format jpeg -o b", "b.jpg")])
def test_format_by_name_or_option(server: str, painter: Painter, arguments: str, name: str) -> None:
    assert run(generate, "a kite", "--server", server, *arguments.split()).exit_code == 0
    with Image.open(name) as image:
        assert image.format.encode().lower() == painter.requests[0]["OUTPUT_FORMAT"][2]


def test_one_failure_stops_nobody_else(server: str) -> None:
    result = run(generate, "a kite", "refuse: WIDTH = 65: no", "slow", "--server", server, "-o", "all/")
    assert result.exit_code == 1
    assert result.stderr == "error: WIDTH = 65: no (refuse: WIDTH = 65: no)\n"
    assert "Traceback" not in result.output
    assert sorted(path.name for path in Path("all").iterdir()) == ["a-kite-4242.png", "slow-4242.png"]


def test_no_server_is_said_once() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    result = run(generate, "a", "b", "--server", address)
    assert result.exit_code == 1
    assert result.stderr == f"error: no server at {address}: start one with `ditpack serve` (2 images)\n"


def test_timeout_option(server: str) -> None:
    result = run(generate, "slow", "--server", server, "--timeout", "0.2")
    assert (result.exit_code, "within 0.2 s" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "96"], "'96' is not WIDTHxHEIGHT"),
        (["--size", "-64x64"], "'-64x64' is not WIDTHxHEIGHT"),
        (["--size", "axb"], "'axb' is not WIDTHxHEIGHT"),
        (["--server", "ftp://host"], "'ftp'"),
        (["--server", "grpc://host", "--protocol", "http"], "contradicts"),
        (["--format", "gif"], "gif"),
        (["-o", "kite.gif"], "no image format"),
        (["-o", "kite.png", "--format", "webp"], "not webp"),
        (["-o", "{size}.png"], "{size}"),
        (["-o", "file/kite.png"], "cannot make file"),
        (["--count", "0"], "'--count'"),
        (["--timeout", "0"], "'--timeout'"),
        (["--steps", "many"], "'--steps'"),
        (["--seed", "1.5"], "'--seed'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    server: str, painter: Painter, arguments: list[str], message: str
) -> None:
    Path("file").touch()
    result = run(generate, "a kite", *([] if "--server" in arguments else ["--server", server]), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert painter.requests == []


def test_unwritable_file_is_a_plain_error(server: str) -> None:
    Path("kite-1.png").mkdir()
    result = run(generate, "a kite", "a boat", "--server", server, "-o", "kite.png")
    assert result.exit_code == 1
    assert result.stderr == "error: cannot write kite-1.png: Is a directory (a kite)\n"
    assert Path("kite-2.png").is_file()


def board_output(**options: Any) -> str:
    console = Console(file=None, width=120, record=True, **options)
    with console.capture() as captured, Board(console, ["a [red] kite", "a boat"], lambda: "engine: 3 steps") as board:
        board.failed(1, "it [broke]")
        board.done(0, "kite.png  seed 7")
    return captured.get()


def test_board_elsewhere_prints_one_plain_line_for_what_was_made() -> None:
    expected = "kite.png  seed 7  a [red] kite\n"
    assert board_output(force_terminal=False, color_system=None) == expected
    dumb = {"TERM": "dumb"}
    assert board_output(force_terminal=True, color_system=None, _environ=dumb) == expected


def test_board_on_a_terminal_shows_every_row_and_the_footer() -> None:
    text = board_output(force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    for part in ("a [red] kite", "kite.png  seed 7", "it [broke]", "engine: 3 steps"):
        assert part in text


METRICS = """# HELP ditpack_steps_total Denoising steps
# TYPE ditpack_steps_total counter
ditpack_steps_total {steps}
ditpack_shared_steps_total 4.0
ditpack_step_requests_total {requests}
ditpack_waiting_requests{{instance="dit_0_0"}} 2
ditpack_waiting_requests{{instance="dit_1_0"}} 3
nv_inference_count{{model="dit",version="1"}} 9
"""


def test_metrics_are_summed_over_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.format(steps=10, requests=25).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            for url in (f"http://127.0.0.1:{server.server_port}", f"http://127.0.0.1:{server.server_port}/metrics"):
                assert read_metrics(url) == {
                    "ditpack_steps_total": 10,
                    "ditpack_shared_steps_total": 4,
                    "ditpack_step_requests_total": 25,
                    "ditpack_waiting_requests": 5,
                    "nv_inference_count": 9,
                }
        finally:
            server.shutdown()
            thread.join(10)
    assert read_metrics(f"http://127.0.0.1:{server.server_port}", timeout=2) == {}


async def _watch(samples: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch) -> EngineWatch:
    monkeypatch.setattr("ditpack_client.metrics.read_metrics", lambda url: samples.pop(0))
    watch = EngineWatch("http://nowhere")
    await watch.begin()
    while samples:
        await watch.poll()
    return watch


def sample(steps: int, requests: int, shared: int) -> dict[str, float]:
    return {
        "ditpack_steps_total": steps,
        "ditpack_step_requests_total": requests,
        "ditpack_shared_steps_total": shared,
        "ditpack_waiting_requests": 2,
    }


def test_engine_watch_counts_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    samples = [sample(100, 150, 20), sample(102, 156, 22), {}, sample(106, 180, 26), sample(106, 180, 26)]
    watch = asyncio.run(_watch(samples, monkeypatch))
    assert (watch.steps, watch.requests, watch.shared, watch.latest) == (6, 30, 6, 6.0)
    assert "6 steps so far, 6 of them shared; the latest packs held 6.0 requests; 2 waiting" in watch.line()
    silent = asyncio.run(_watch([{}, {}], monkeypatch))
    assert (silent.steps, silent.line()) == (0, "engine: no metrics at http://nowhere")


def test_demo_asks_for_a_real_mix() -> None:
    requests = demo_requests()
    assert len(requests) >= 8
    for name, least in {"prompt": 8, "seed": 8, "num_inference_steps": 8}.items():
        assert len({request[name] for request in requests}) >= least
    assert len({(request["width"], request["height"]) for request in requests}) >= 8
    assert all(
        request[side] % 16 == 0 and 64 <= request[side] <= 192 for request in requests for side in ("width", "height")
    )


def test_demo_against_a_running_server(server: str, painter: Painter) -> None:
    result = run(demo, "--server", server, "--metrics", "http://127.0.0.1:9", "--out", "shown")
    assert result.exit_code == 0, result.output
    count = len(demo_requests())
    assert painter.models.count("qwen_image") == 1 + 2 * count  # a warm-up, all at once, one at a time
    assert painter.models.count("qwen_image_edit") == 6
    assert "edits: 6, at once too" in result.stdout
    written = sorted(path.name for path in Path("shown").iterdir())
    assert len(written) == count + 2
    assert written[-2:] == ["contact-sheet.png", "edits.png"]
    assert f"{count} of {count} images are the same to the last bit" in result.stdout
    steps = sum(request["num_inference_steps"] or 0 for request in demo_requests())
    assert f"{steps} denoising steps, {7 * count} of them in a pack with other images" in result.stdout


def test_demo_leaves_edits_out_where_the_checkpoint_makes_none(server: str, painter: Painter) -> None:
    painter.served = ("qwen_image",)
    result = run(demo, "--server", server, "--metrics", "http://127.0.0.1:9", "--out", "shown", "--no-alone")
    assert result.exit_code == 0, result.output
    assert "edits" not in result.stdout
    assert not Path("shown/edits.png").exists()


def test_demo_without_its_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    result = run(demo_module.demo, "--server", address)
    assert result.exit_code == 1
    assert result.stderr == f"error: no server at {address}: start one with `ditpack serve`\n"
