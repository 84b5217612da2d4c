"""What the tests of streams share: a stream's events, of either client, as one list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ditpack_client import AsyncClient, Client, Event

Stream = Callable[..., list[Event]]


def blocking(url: str, prompt: str, **settings: Any) -> list[Event]:
    with Client(url) as client:
        return list(client.stream(prompt, **{"timeout": 20.0, **settings}))


def awaited(url: str, prompt: str, **settings: Any) -> list[Event]:
    async def run() -> list[Event]:
        async with AsyncClient(url) as client:
            return [event async for event in client.stream(prompt, **{"timeout": 20.0, **settings})]

    return asyncio.run(run())


both = pytest.mark.parametrize("stream", [blocking, awaited])
