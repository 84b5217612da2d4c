"""Retries of the client against a fake server: when, how often, how long, and one behaviour of four transports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_kserve import SLOW_S, Painter
from stream_tools import Stream, awaited, blocking, both

from ditpack_client import AsyncClient, Client, Finished, GenerationError, ImageResult, Retrying, call


@pytest.fixture
def painter() -> Painter:
    return Painter(streams=True)


@pytest.fixture
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_FIRST_S", 0.02)


def unary_blocking(url: str, **settings: Any) -> ImageResult:
    with Client(url) as client:
        return client.generate("a kite", **settings)


def unary_awaited(url: str, **settings: Any) -> ImageResult:
    async def run() -> ImageResult:
        async with AsyncClient(url) as client:
            return await client.generate("a kite", **settings)

    return asyncio.run(run())


def streamed(stream: Stream) -> Callable[..., ImageResult]:
    def run(url: str, **settings: Any) -> ImageResult:
        events = stream(url, "a kite", **settings)
        assert [event.reason for event in events if isinstance(event, Retrying)] == [FULL] * 2
        assert isinstance(events[-1], Finished)
        return events[-1].result

    return run


FULL = "full: 4 requests have been waiting for 1 s"
four = pytest.mark.parametrize("make", [unary_blocking, unary_awaited, streamed(blocking), streamed(awaited)])


@four
@pytest.mark.usefixtures("fast_retries")
def test_retries_until_there_is_room(url: str, painter: Painter, make: Callable[..., ImageResult]) -> None:
    painter.refusals = 2
    result = make(url, retries=2)
    assert painter.ids == [result.request_id] * 3  # one id: a cancel reaches whichever try it is


@pytest.mark.parametrize("make", [unary_blocking, unary_awaited])
@pytest.mark.usefixtures("fast_retries")
def test_retries_are_counted_and_off_by_default(url: str, painter: Painter, make: Callable[..., ImageResult]) -> None:
    for retries in ({}, {"retries": 3}):
        painter.refusals, before = 9, len(painter.ids)
        with pytest.raises(GenerationError) as caught:
            make(url, **retries)
        assert caught.value.code == "UNAVAILABLE"
        assert len(painter.ids) - before == 1 + retries.get("retries", 0)


@both
@pytest.mark.usefixtures("fast_retries")
@pytest.mark.parametrize("prompt", ["refuse: WIDTH = 65: no", "cut", "slow"])
def test_nothing_else_is_retried(url: str, painter: Painter, stream: Stream, prompt: str) -> None:
    with pytest.raises(GenerationError) as caught:
        stream(url, prompt, retries=5, timeout=0.5 * SLOW_S)
    assert caught.value.code in ("INVALID_ARG", "INTERNAL", "TIMEOUT")
    assert len(painter.ids) == 1


def test_retries_end_with_the_time(url: str, painter: Painter) -> None:
    painter.refusals = 9
    began = time.monotonic()
    with Client(url) as client, pytest.raises(GenerationError) as caught:
        client.generate("a kite", retries=9, timeout=0.5)  # the first retry would come after a second or more
    assert time.monotonic() - began < 0.5
    assert (caught.value.code, len(painter.ids)) == ("UNAVAILABLE", 1)


def test_waits_double_vary_and_are_bounded() -> None:
    waits = [[0.0] * 8 for _ in range(20)]
    for row in waits:
        one = call.Call({"prompt": "a"}, 300, 8, None)
        for index in range(8):
            row[index] = one.retry(GenerationError("UNAVAILABLE", "full")).seconds
    for index, column in enumerate(zip(*waits, strict=True)):
        longest = min(2.0 * 2**index, 30.0)
        assert all(longest / 2 <= wait <= longest for wait in column)
        assert len(set(column)) > 10
