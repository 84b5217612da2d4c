"""Notices that a running server can no longer serve, which Triton 2.51 itself does not: it stays ready and never
restarts a model's process that died.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ditpack.engine import channel

LOOK_S = 1.0  # between two looks
_SILENCE_S = 30.0  # an engine that does not answer for so long has a process that hangs
_ANSWER_S = 2.0
_STUB = "triton_python_backend_stub"


class Watchdog:
    """Watches the models' processes below ``server`` and the engines that listen in ``run_directory``.

    Make it once the server is ready: it expects that what is there then stays there.
    """

    def __init__(self, server: int, run_directory: Path) -> None:
        self._processes = _stubs(server)
        self._heard = dict.fromkeys(channel.sockets(run_directory), time.monotonic())

    def trouble(self) -> str | None:
        """What is wrong, or None. Takes a few milliseconds; longer only while an engine does not answer."""
        for pid, (started, model) in self._processes.items():
            if _facts(pid) != (started, True):
                return f"the process of model '{model}' died (process {pid})"
        for path, heard in self._heard.items():
            answer = channel.ask(path, {"do": "status"}, _ANSWER_S)
            if answer is None:
                if time.monotonic() - heard > _SILENCE_S:
                    return f"{path.stem} has not answered for {_SILENCE_S:g} s"
                continue
            self._heard[path] = time.monotonic()
            if answer["refusal"] is not None:
                return f"{path.stem}: {answer['refusal']}"
        return None


def _stubs(server: int) -> dict[int, tuple[str, str]]:
    """The Python backend's processes below ``server``: when each started, and the model that it runs."""
    parents = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(directory.name)] = int(_stat(int(directory.name))[1])
        except OSError:  # it ended meanwhile
            continue
    found = {}
    for pid in parents:
        ancestor = pid
        while ancestor not in (server, 0):
            ancestor = parents.get(ancestor, 0)
        try:
            arguments = [os.fsdecode(each) for each in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
            started = _stat(pid)[19]
        except OSError:
            continue
        if ancestor == server and len(arguments) > 1 and Path(arguments[0]).name == _STUB:
            found[pid] = (started, Path(arguments[1]).parent.parent.name)  # <model>/<version>/model.py
    return found


def _facts(pid: int) -> tuple[str, bool]:
    """When the process started, which tells its number from a later one's; whether it lives."""
    try:
        stat = _stat(pid)
    except OSError:
        return "", False
    return stat[19], stat[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """/proc/…/stat from the state on, behind the name, which may have spaces in it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
