"""Streams and cancels of the client against a fake server: one behaviour, four transports."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest
from fake_kserve import Painter, serve_grpc, serve_http
from stream_tools import Stream, both
from test_client import listener

from ditpack_client import (
    AsyncClient,
    Client,
    Finished,
    GenerationError,
    Preview,
    Queued,
    Step,
)

ID = "0123456789abcdef0123456789abcdef"
SOON = 5.0


@pytest.fixture
def painter() -> Painter:
    return Painter(streams=True)


def wait_for(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


@both
def test_events_in_their_order(url: str, painter: Painter, stream: Stream) -> None:
    events = stream(url, "a kite", num_inference_steps=4, width=32, height=16, seed=2**31 - 1, preview_every=2)
    request_id = painter.ids[0]
    assert re.fullmatch("[0-9a-f]{32}", request_id)
    assert {event.id for event in events} == {request_id}
    kinds = [Queued, Queued, Step, Step, Preview, Step, Step, Preview, Finished]
    assert [type(event) for event in events] == kinds
    assert events[:3] == [Queued(request_id, None), Queued(request_id, 2), Step(request_id, 1, 4, 0.25, 0.75)]
    preview, end = events[4], events[-1]
    assert isinstance(preview, Preview)
    assert (preview.step, preview.steps, preview.image.size, preview.data[:2]) == (2, 4, (8, 6), b"\xff\xd8")
    assert isinstance(end, Finished)
    result = end.result
    assert (result.image.size, result.image.getpixel((0, 0)), result.seed) == ((32, 16), (255, 20, 30), 2**31 - 1)
    assert (result.model, result.request_id, result.steps) == ("qwen_image", request_id, 4)
    assert painter.models == ["qwen_image_stream"]
    assert painter.requests[0]["PREVIEW_EVERY"][1:] == ((1,), 2)


@both
def test_previews_are_only_sent_when_asked_for(url: str, painter: Painter, stream: Stream) -> None:
    assert not any(isinstance(event, Preview) for event in stream(url, "a kite", request_id=ID))
    assert (painter.ids, set(painter.requests[0])) == ([ID], {"PROMPT"})


@both
@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        ("refuse: WIDTH = 65: is not ready", "INVALID_ARG", "WIDTH = 65: is not ready"),
        ("refuse: DEADLINE_MS = 5: the deadline passed after 2 steps", "CANCELLED", None),
        ("busy", "UNAVAILABLE", "full: the waiting room"),
        ("cut", "INTERNAL", "ended without an image"),
    ],
)
def test_errors_have_their_codes(url: str, stream: Stream, prompt: str, code: str, message: str | None) -> None:
    with pytest.raises(GenerationError) as caught:
        stream(url, prompt, request_id=ID)
    assert caught.value.code == code
    assert (message or "the deadline passed") in caught.value.message
    assert caught.value.request_id == ID


@both
def test_a_server_full_from_the_beginning(url: str, painter: Painter, stream: Stream) -> None:
    """Over HTTP Triton answers such an error with the status 400."""
    painter.refusals = 1
    with pytest.raises(GenerationError) as caught:
        stream(url, "a kite")
    assert (caught.value.code, caught.value.message) == ("UNAVAILABLE", "full: 4 requests have been waiting for 1 s")


@both
def test_a_server_without_streams(stream: Stream) -> None:
    for serve in (serve_http, serve_grpc):
        with serve(Painter()) as url, pytest.raises(GenerationError) as caught:
            stream(url, "a kite")
        assert caught.value.code == "NOT_FOUND"


@both
def test_time_is_limited_as_a_whole(url: str, painter: Painter, stream: Stream) -> None:
    """Though every single event comes in time; and the server learns of it."""
    began = time.monotonic()
    with pytest.raises(GenerationError) as caught:
        stream(url, "endless", timeout=0.3, request_id=ID)
    assert time.monotonic() - began < SOON
    assert (caught.value.code, caught.value.message.endswith("within 0.3 s")) == ("TIMEOUT", True)
    wait_for(lambda: painter.ended[ID] == "gone")


QUEUED = {"EVENT": json.dumps({"event": "queued", "id": ID, "position": 1})}


@both
@pytest.mark.parametrize(
    ("sent", "code", "message"),
    [
        (f"data: {json.dumps(QUEUED)}\n\n", "UNAVAILABLE", "closed the connection"),
        (f"data: {json.dumps(QUEUED)}\n\ndata: {{", "UNAVAILABLE", "closed the connection"),
        ("data: nonsense\n\n", "INTERNAL", "no JSON"),
        ("data: [1]\n\n", "INTERNAL", "no JSON objects"),
        ('data: {"SEED_USED": 1}\n\n', "INTERNAL", "has no EVENT"),
        ('data: {"EVENT": "{}"}\n\n', "INTERNAL", "has no 'event'"),
        ('data: {"EVENT": "7"}\n\n', "INTERNAL", "no JSON"),
    ],
)
def test_a_stream_that_breaks(stream: Stream, sent: str, code: str, message: str) -> None:
    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(f"{head}{len(sent):x}\r\n{sent}\r\n".encode())

    with listener(behave) as url, pytest.raises(GenerationError) as caught:
        stream(url, "a kite")
    assert (caught.value.code, message in caught.value.message) == (code, True), caught.value


@pytest.mark.parametrize("length", [3, 10_000_000])
def test_an_answer_that_trickles_is_bounded_as_a_whole(length: int) -> None:
    """Each part comes well before the time-out, and one is missing at the end when the server gives up."""

    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length)
        with suppress(OSError):  # the client has gone
            for _ in range(min(length - 1, 100)):
                connection.sendall(b"x")
                time.sleep(0.02)

    with listener(behave) as url, Client(url) as client, pytest.raises(GenerationError) as caught:
        client.generate("a kite", timeout=0.3)
    assert caught.value.code == ("UNAVAILABLE" if length == 3 else "TIMEOUT")


def test_leaving_the_loop_cancels(url: str, painter: Painter) -> None:
    with Client(url) as client:
        for event in client.stream("endless", request_id=ID):
            if isinstance(event, Step):
                break
        wait_for(lambda: painter.ended[ID] == "gone")


def leave_by_break(client: AsyncClient) -> Any:
    async def leave() -> None:
        async for event in client.stream("endless", request_id=ID):
            if isinstance(event, Step):
                break

    return leave()


def leave_by_aclose(client: AsyncClient) -> Any:
    async def leave() -> None:
        async with aclosing(client.stream("endless", request_id=ID)) as events:
            async for event in events:
                if isinstance(event, Step):
                    return

    return leave()


def leave_by_cancel(client: AsyncClient) -> Any:
    async def leave() -> None:
        async def read() -> None:
            async for _ in client.stream("endless", request_id=ID):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    return leave()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_aclose, leave_by_cancel])
def test_leaving_with_asyncio_cancels(url: str, painter: Painter, leave: Callable[[AsyncClient], Any]) -> None:
    async def run() -> None:
        async with AsyncClient(url) as client:
            await leave(client)
            await asyncio.to_thread(wait_for, lambda: painter.ended.get(ID) == "gone")

    asyncio.run(run())


def test_a_time_out_of_the_caller_strikes_only_there(url: str) -> None:
    async def run() -> int:
        seen = 0

        async def count(client: AsyncClient) -> None:
            nonlocal seen
            async with asyncio.timeout(0.2):
                async for _ in client.stream("endless"):
                    seen += 1

        async with AsyncClient(url) as client:
            with pytest.raises(TimeoutError):
                await count(client)
        return seen

    assert asyncio.run(run()) > 2


def test_streams_at_once_on_one_client(url: str, painter: Painter) -> None:
    ends: list[int] = []
    barrier = threading.Barrier(6)

    def run(seed: int) -> None:
        barrier.wait()
        for event in client.stream("slow", seed=seed, timeout=20):
            if isinstance(event, Finished):
                ends.append(event.result.seed)

    with Client(url) as client:
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sorted(ends) == list(range(6))
    assert painter.at_once == 6


def test_cancel_by_id_from_elsewhere(url: str, painter: Painter) -> None:
    """A stream and a unary request alike; both say so."""
    codes: list[tuple[str, str | None]] = []

    def make(run: Callable[[], object]) -> None:
        with pytest.raises(GenerationError) as caught:
            run()
        codes.append((caught.value.code, caught.value.request_id))

    async def cancel(request_id: str) -> bool:
        async with AsyncClient(url) as client:
            return await client.cancel(request_id)

    with Client(url) as client:
        calls = [
            lambda: list(client.stream("endless", request_id=f"stream-{ID}")),
            lambda: client.generate("endless", request_id=f"unary-{ID}"),
        ]
        threads = [threading.Thread(target=make, args=(run,)) for run in calls]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(painter.ids) == 2)
        assert client.cancel(f"stream-{ID}") is True
        assert asyncio.run(cancel(f"unary-{ID}")) is True
        for thread in threads:
            thread.join(SOON)
        assert sorted(codes) == [("CANCELLED", f"stream-{ID}"), ("CANCELLED", f"unary-{ID}")]
        assert client.cancel(f"stream-{ID}") is False
        with pytest.raises(GenerationError, match="at least 16") as caught:
            client.cancel("7")
        assert caught.value.code == "INVALID_ARG"


def test_status_and_readiness(url: str) -> None:
    async def awaited() -> tuple[Any, bool, bool]:
        async with AsyncClient(url) as client:
            return await client.status(), await client.is_ready(), await client.is_ready("nope")

    with Client(url) as client:
        found = client.status(), client.is_ready(), client.is_ready("nope")
    assert found == asyncio.run(awaited())
    assert found == ([{"name": "dit_0_0", "healthy": True, "active": 0, "waiting": 0}], True, False)


def test_every_unary_request_has_an_id_of_its_own(url: str, painter: Painter) -> None:
    with Client(url) as client:
        results = [client.generate("a kite"), client.edit("snow", b"file"), client.generate("a kite", request_id=ID)]
        outcomes = [outcome for _, outcome in client.generate_many([{"prompt": "a"}, {"prompt": "busy"}])]
    assert [result.request_id for result in results] == painter.ids[:3]
    assert {outcome.request_id for outcome in outcomes} == set(painter.ids[3:])
    assert len(set(painter.ids)) == 5
    assert painter.ids[2] == ID


def test_programming_mistakes() -> None:
    with Client() as client:
        for wrong in ({"retries": -1}, {"preview_every": -1}, {"timeout": 0}):
            with pytest.raises(ValueError, match="must"):
                client.stream("a kite", **wrong)
