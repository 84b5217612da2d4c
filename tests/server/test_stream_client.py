"""The client's streams, cancels and retries, and the command's Ctrl-C, against the real server."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from server_tools import NARROW_QUEUE, TIMEOUT, load, metric, wait_until

from ditpack.tritonserver.launch import TritonServer
from ditpack_client import AsyncClient, Client, Event, Finished, GenerationError, Preview, Queued, Retrying, Step

pytestmark = pytest.mark.server

APPLE: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 12, "seed": 5}
LONG: dict[str, Any] = {"width": 768, "height": 768, "num_inference_steps": 200}


def address(server: TritonServer, protocol: str) -> str:
    return server.http_url if protocol == "http" else f"grpc://{server.grpc_url}"


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: TritonServer) -> str:
    return address(server, request.param)


def cancelled(server: TritonServer) -> float:
    return metric(server, "ditpack_requests_total", outcome="cancelled")


def wait_until_cancelled(server: TritonServer, count: float) -> None:
    wait_until(f"{count:g} cancelled requests", lambda: cancelled(server) >= count and load(server) == (0, 0))


def test_events_and_the_same_picture(url: str) -> None:
    async def awaited() -> list[Event]:
        async with AsyncClient(url) as client:
            return [event async for event in client.stream("a red apple", preview_every=4, timeout=TIMEOUT, **APPLE)]

    with Client(url) as client:
        alone = client.generate("a red apple", timeout=TIMEOUT, **APPLE)
        told = [list(client.stream("a red apple", preview_every=4, timeout=TIMEOUT, **APPLE)), asyncio.run(awaited())]
    for events in told:
        assert isinstance(events[0], Queued)
        steps = [event for event in events if isinstance(event, Step)]
        assert [event.step for event in steps] == sorted({event.step for event in steps})
        assert {event.steps for event in steps} == {12}
        previews = [event for event in events if isinstance(event, Preview)]
        assert all(event.step % 4 == 0 and event.image.format == "JPEG" for event in previews)
        end = events[-1]
        assert isinstance(end, Finished)
        assert end.result.data == alone.data
        assert (end.result.seed, end.result.steps, end.result.request_id) == (5, 12, events[0].id)


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"width": 65}, "INVALID_ARG", "WIDTH = 65: must be a multiple of 16"),
        ({"output_format": "raw"}, "INVALID_ARG", "OUTPUT_FORMAT = 'raw'"),
        ({"deadline_ms": 1}, "CANCELLED", "DEADLINE_MS = 1: the deadline passed"),
    ],
)
def test_errors_have_the_same_codes_in_a_stream(url: str, settings: dict[str, Any], code: str, message: str) -> None:
    with Client(url) as client, pytest.raises(GenerationError) as caught:
        list(client.stream("a red apple", timeout=TIMEOUT, **settings))
    assert caught.value.code == code
    assert caught.value.message.startswith(message)


def test_leaving_a_stream_cancels(server: TritonServer, url: str) -> None:
    async def leave() -> None:
        async with (
            AsyncClient(url) as client,
            aclosing(client.stream("a red apple", timeout=TIMEOUT, **LONG)) as events,
        ):
            await anext(event async for event in events if isinstance(event, Step))

    before = cancelled(server)
    with Client(url) as client:
        for event in client.stream("a red apple", timeout=TIMEOUT, **LONG):
            if isinstance(event, Step):
                break
        wait_until_cancelled(server, before + 1)
        asyncio.run(leave())
        wait_until_cancelled(server, before + 2)
        with pytest.raises(GenerationError, match=r"within 0\.5 s"):
            list(client.stream("a red apple", timeout=0.5, **LONG))
        wait_until_cancelled(server, before + 3)


def test_cancel_by_id(server: TritonServer, url: str) -> None:
    """A stream and a unary request; neither is answered otherwise."""
    codes: dict[str, str] = {}

    def make(request_id: str, streams: bool) -> None:
        make_one = (lambda *a, **b: list(client.stream(*a, **b))) if streams else client.generate
        with pytest.raises(GenerationError) as caught:
            make_one("a red apple", request_id=request_id, timeout=TIMEOUT, **LONG)
        codes[str(caught.value.request_id)] = caught.value.code

    ids = {f"{kind}-{time.monotonic_ns():020}": kind == "stream" for kind in ("stream", "unary")}
    with Client(url) as client:
        threads = [threading.Thread(target=make, args=call) for call in ids.items()]
        for thread in threads:
            thread.start()
        wait_until("two in the engine", lambda: sum(load(server)) == 2)
        (engine,) = client.status()
        assert (engine["healthy"], engine["active"] + engine["waiting"]) == (True, 2)
        assert [client.cancel(request_id) for request_id in ids] == [True, True]
        for thread in threads:
            thread.join(TIMEOUT)
        assert client.cancel(next(iter(ids))) is False
        with pytest.raises(GenerationError, match="at least 16 characters") as caught:
            client.cancel("7")
    assert codes == dict.fromkeys(ids, "CANCELLED")
    assert caught.value.code == "INVALID_ARG"


def test_readiness(url: str) -> None:
    with Client(url) as client:
        ready = [client.is_ready(model, timeout=TIMEOUT) for model in (None, "qwen_image_stream", "nope")]
    assert ready == [True, True, False]


def test_ctrl_c(server: TritonServer, url: str, tmp_path: Path) -> None:
    before = cancelled(server)
    # A shell's background jobs, and so perhaps these tests, ignore SIGINT, and what they start would too.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "import typer; from ditpack_client.cli import generate; typer.run(generate)"
    arguments = ["a red apple", "--count", "3", "--size", "768x768", "--steps", "200", "--server", url, "-o", "out/"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    wait_until("three in the engine", lambda: sum(load(server)) == 3)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, output, errors) == (130, "", "cancelled on the server: 3 of 3\n")
    wait_until_cancelled(server, before + 3)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_full_server_is_tried_again(narrow: TritonServer, protocol: str) -> None:
    ended: list[str] = []
    events: list[Event] = []

    async def occupy(client: AsyncClient) -> None:
        try:
            async for _ in client.stream("a red apple", timeout=TIMEOUT, **LONG):
                pass
        except GenerationError as error:
            ended.append(error.code)

    async def run() -> None:
        async with AsyncClient(address(narrow, protocol)) as client:
            others = [asyncio.create_task(occupy(client)) for _ in range(8)]
            while len(ended) < 8 - 1 - NARROW_QUEUE:  # what does not fit
                await asyncio.sleep(0.05)
            async for event in client.stream("a red apple", timeout=TIMEOUT, retries=20, **APPLE):
                events.append(event)
                if isinstance(event, Retrying):
                    for other in others:
                        other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT))
    assert set(ended) == {"UNAVAILABLE"}
    assert any(isinstance(event, Retrying) for event in events)
    assert isinstance(events[-1], Finished)
    wait_until("an idle server", lambda: load(narrow) == (0, 0))
