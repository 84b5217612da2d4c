"""Processes that form one gloo group, kept for many tests: starting one costs seconds, calling it milliseconds."""

from __future__ import annotations

import datetime
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120.0  # seconds; every wait of the tests ends

_groups: dict[int, Any] = {}  # in a rank: the first n ranks as a group


def group(degree: int) -> dist.ProcessGroup:
    """In a rank: the group of the first ``degree`` ranks."""
    return _groups[degree]


class Ranks:
    """``count`` ranks, each a process, and the groups of the first n of them for every n from 1."""

    def __init__(self, count: int, directory: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "ditpack.parallel.ulysses"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, count, str(directory / "store")), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, degree: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function`` of a module, called in each of the first ``degree`` ranks, returns there."""
        pipes = self._pipes[:degree]
        for pipe in pipes:
            pipe.send((function, (degree, *args)))
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TIMEOUT), f"rank {rank} does not answer"
            ok, result = pipe.recv()
            assert ok, f"rank {rank}: {result}"
            results.append(result)
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(TIMEOUT)
            assert process.exitcode == 0


def _serve(pipe: Connection, rank: int, count: int, store: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timeout)
    for degree in range(1, count + 1):
        _groups[degree] = dist.new_group(list(range(degree)))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
