"""The processes of one group of ranks, seen from the engine's process, which is none of them.

It takes part in no collective and touches no device, so nothing that happens to a rank can hang it: a rank that dies
closes its channel, one that hangs stops answering or beating, and either way the whole group is killed and whoever
waits for it learns so. A group that is lost stays lost; ``sampler.ParallelSampler`` starts the next one.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from ditpack.errors import Unavailable
from ditpack.models.families import UnusableError
from ditpack.parallel.messages import Failure, WorkerConfig

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 3600.0
_CLOSE_TIMEOUT_S = 10.0
_GRACE_S = 2.0  # for the other answers, once a rank has failed: they may be caught in a collective with it
_WAIT_S = 0.25


class WorkersLost(Unavailable):
    """The ranks are gone, and with them what they held."""


class CallFailed(RuntimeError):
    """A call failed on the ranks, which are alive and still agree with each other."""


class WorkerGroup:
    """Starts a process for each of ``config.devices``. ``wait_ready``, then ``call``, then ``close``.

    Only one thread may call. The thread that makes the group must outlive it: the kernel kills the workers with it.

    Args:
        timeout_s: the longest that an answer or a sign of life may take.
    """

    def __init__(self, config: WorkerConfig, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._directory = tempfile.mkdtemp(prefix="ditpack-workers-")
        self._config = replace(config, store=os.path.join(self._directory, "store"))
        self._changed = threading.Condition()  # guards the next four
        self.lost: str | None = None  # why, once it is
        self._closing = False
        self._answers: dict[int, Any] = {}  # by rank, to the current call
        self._results: dict[int, Future[torch.Tensor]] = {}
        self._current = 0
        self._numbers = itertools.count(1)
        self._tickets = itertools.count()
        self._forgotten: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._watched = False  # whether silence counts: not while the workers load
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Connection] = []
        self._seen = [time.monotonic()] * len(config.devices)
        try:
            for rank in range(len(config.devices)):
                self._start(rank)
        except BaseException:
            self._kill()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), name=f"ditpack-rank-{rank}", daemon=True)
            for rank in range(len(config.devices))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_ready(self) -> None:
        """Wait until every rank has loaded its copy and has met the others.

        Raises:
            UnusableError: a setting that a rank cannot serve.
            CallFailed, WorkersLost: whatever else kept a rank from loading.
        """
        try:
            for rank, channel in enumerate(self._channels):
                channel.send_bytes(pickle.dumps(replace(self._config, rank=rank)))
        except OSError as error:
            self.lose(f"a worker cannot be reached ({error})")
        answers = self._collect(_LOAD_TIMEOUT_S)
        failures = _failures(answers)
        if failures or len(answers) < len(self._channels):
            self.lose(f"not loaded within {_LOAD_TIMEOUT_S:g} s")
            if failures and failures[0].setting:
                raise UnusableError(failures[0].setting, failures[0].reason)
            raise _failed(failures[0]) if failures else WorkersLost(f"the workers cannot load: {self.lost}")
        self.call("warm_up", timeout_s=_LOAD_TIMEOUT_S)
        shutil.rmtree(self._directory, ignore_errors=True)  # the ranks have met
        self._seen = [time.monotonic()] * len(self._channels)
        self._watched = True

    def call(self, verb: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Have every rank do ``verb``; what each of them answers.

        Raises:
            CallFailed: it failed; the group can be used further.
            WorkersLost: a rank died or hangs, or the ranks are not in the same state any more.
        """
        number = next(self._numbers)
        forgotten = [self._forgotten.get() for _ in range(self._forgotten.qsize())]
        message = pickle.dumps((number, verb, arguments, forgotten))
        with self._changed:
            self._current, self._answers = number, {}
        try:
            for channel in self._channels:
                channel.send_bytes(message)
        except OSError as error:
            self.lose(f"a worker cannot be reached ({error})")
        timeout_s = timeout_s or self._timeout_s
        answers = self._collect(timeout_s)
        failures = _failures(answers)
        if len(answers) < len(self._channels):
            silent = [self._name(rank) for rank in range(len(self._channels)) if rank not in answers]
            reason = f"no answer to {verb} from {', '.join(silent)} within {timeout_s:g} s"
            self.lose(f"{failures[0].reason}; then {reason}" if failures else reason)
        elif failures and verb == "step" and (len(failures) < len(answers) or len({f.reason for f in failures}) > 1):
            self.lose(f"a step failed on some ranks only, or in different ways: {failures[0].reason}")
        if self.lost is not None:
            raise WorkersLost(f"the workers were lost: {self.lost}")
        if failures:
            raise _failed(failures[0])
        return [answers[rank] for rank in range(len(self._channels))]

    def latents(self, key: int, verb: str) -> Future[torch.Tensor]:
        """The latents of member ``key``, as ``verb`` (finish or preview) of the first rank's sampler brings them."""
        ticket = next(self._tickets)
        future: Future[torch.Tensor] = Future()
        self._results[ticket] = future
        self.call("send_latents", ticket, key, verb)
        return future

    def forget(self, key: int) -> None:
        """Let the ranks drop member ``key`` with the next call. Any thread may say so."""
        self._forgotten.put(key)

    def look(self) -> None:
        """Lose the group if a rank has not been heard of for too long. To be called now and then, by any thread."""
        oldest = min(self._seen)
        if self._watched and time.monotonic() - oldest > self._timeout_s:
            self.lose(f"nothing heard of {self._name(self._seen.index(oldest))} for {self._timeout_s:g} s")

    def lose(self, reason: str) -> None:
        """Kill all ranks and let everybody who waits for them know."""
        with self._changed:
            if self.lost is not None or self._closing:
                return
            self.lost = reason
            waiting, self._results = self._results, {}
            self._changed.notify_all()
        self._kill()
        for future in waiting.values():
            future.set_exception(WorkersLost(f"the workers were lost: {reason}"))

    def close(self) -> None:
        """End the processes, by asking first; none is left."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            for channel in self._channels:
                channel.send_bytes(pickle.dumps((0, "close", (), ())))
            until = time.monotonic() + _CLOSE_TIMEOUT_S
            for process in self._processes:
                process.wait(max(0.0, until - time.monotonic()))
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._kill()
        for reader in self._readers:
            reader.join(_CLOSE_TIMEOUT_S)
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-m", "ditpack.parallel.worker", str(theirs.fileno()), str(os.getpid())]
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()])
            )
            self._channels.append(Connection(ours.detach()))
        logger.info("%s: process %d", self._name(rank), self._processes[rank].pid)

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._config.devices[rank]})"

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            try:
                process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.error("process %d does not end, though killed", process.pid)

    def _collect(self, timeout: float) -> dict[int, Any]:
        """The answers of the current call: all, or those there are when time is up or the group is lost.

        Once a rank has failed the others get a few seconds more: they may be caught in a collective with it.
        """
        until = time.monotonic() + timeout
        failed = False
        with self._changed:
            while len(self._answers) < len(self._channels) and self.lost is None:
                if not failed and _failures(self._answers):
                    failed = True
                    until = min(until, time.monotonic() + _GRACE_S)
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, _WAIT_S))
            return dict(self._answers)

    # The readers' threads.

    def _read(self, rank: int) -> None:
        channel = self._channels[rank]
        try:
            while True:
                kind, *content = pickle.loads(channel.recv_bytes())
                self._seen[rank] = time.monotonic()
                if kind == "answer":
                    self._take_answer(rank, *content)
                elif kind == "latents":
                    ticket, latents = content
                    with self._changed:
                        future = self._results.pop(ticket, None)
                    if future is not None:
                        future.set_result(torch.from_numpy(latents))
                elif kind == "log":
                    level, name, text = content
                    logging.getLogger(name).log(level, "%s", text)
        except (EOFError, OSError):
            self.lose(f"{self._name(rank)} {self._end(rank)}")
        except Exception as error:
            logger.exception("%s said what nobody understands", self._name(rank))
            self.lose(f"{self._name(rank)} cannot be understood ({type(error).__name__})")

    def _take_answer(self, rank: int, number: int, answer: Any) -> None:
        with self._changed:
            if number == self._current:
                self._answers[rank] = answer
                self._changed.notify_all()

    def _end(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _failures(answers: dict[int, Any]) -> list[Failure]:
    return [answer for answer in answers.values() if isinstance(answer, Failure)]


def _failed(failure: Failure) -> CallFailed:
    error = CallFailed(failure.reason)
    error.add_note(f"On the rank:\n{failure.trace}")
    return error
