"""The engine's and Triton's counters, read from a server's Prometheus endpoint."""

from __future__ import annotations

import asyncio
import http.client
import re
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # straight there, as the HTTP client goes
_SAMPLE = re.compile(r"^((?:ditpack|nv_inference)_\w+)(?:\{.*\})? (\S+)")
_POLL_SECONDS = 0.4


def read_metrics(url: str, timeout: float = 2.0) -> dict[str, float]:
    """ditpack's metrics and Triton's by name, summed over their labels; empty where the endpoint does not answer.

    ``url`` is "http://host:8002", with or without "/metrics".
    """
    try:
        with _OPENER.open(f"{url.rstrip('/').removesuffix('/metrics')}/metrics", timeout=timeout) as response:
            text = response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return {}
    totals: dict[str, float] = {}
    for match in filter(None, map(_SAMPLE.match, text.splitlines())):
        totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
    return totals


class EngineWatch:
    """What the engine did since ``begin``: ``steps`` (forwards), ``shared`` ones among them, ``requests`` summed over
    the steps, and ``latest``, the mean pack between the last two polls that saw a step."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._base: dict[str, float] = {}
        self._now: dict[str, float] = {}
        self.latest = 0.0

    @property
    def steps(self) -> int:
        return self._since_begin("ditpack_steps_total")

    @property
    def shared(self) -> int:
        return self._since_begin("ditpack_shared_steps_total")

    @property
    def requests(self) -> int:
        return self._since_begin("ditpack_step_requests_total")

    async def begin(self) -> None:
        self._base = self._now = await asyncio.to_thread(read_metrics, self._url)

    async def poll(self) -> None:
        steps, requests = self.steps, self.requests
        self._now = await asyncio.to_thread(read_metrics, self._url) or self._now
        if self.steps > steps:
            self.latest = (self.requests - requests) / (self.steps - steps)

    def line(self) -> str:
        """The above, for people."""
        if not self._now:
            return f"engine: no metrics at {self._url}"
        waiting = self._now.get("ditpack_waiting_requests", 0)
        return (
            f"engine: {self.steps} steps so far, {self.shared} of them shared; "
            f"the latest packs held {self.latest:.1f} requests; {waiting:.0f} waiting"
        )

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        """Poll until the block ends, and once after it."""

        async def forever() -> None:
            while True:
                await self.poll()
                await asyncio.sleep(_POLL_SECONDS)

        task = asyncio.create_task(forever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.poll()

    def _since_begin(self, name: str) -> int:
        return int(self._now.get(name, 0) - self._base.get(name, 0))
