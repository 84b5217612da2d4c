"""The thread that hands out answers, so that a slow receiver never holds up a step."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class DeliveryThread:
    """Runs the calls put into it, one after the other, in order. A call that raises is logged and does no harm."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ditpack-delivery", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def flush(self, timeout: float) -> bool:
        """Wait until what was put so far has run; whether it had within ``timeout`` seconds."""
        done = threading.Event()
        self._calls.put(done.set)
        return done.wait(max(0.0, timeout))

    def close(self, timeout: float) -> None:
        """Run what was put so far, then end; wait for that at most ``timeout`` seconds."""
        self._calls.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("an answer could not be delivered")
