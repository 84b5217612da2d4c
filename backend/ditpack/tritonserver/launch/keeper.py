"""The process between ditpack and tritonserver: it owns the server's end, however that comes.

Started as a script by server.py, it runs the server as its child, prints the server's process id, and waits. When the
server has ended (by itself, on SIGTERM to the keeper, killed on SIGQUIT to the keeper, or because ditpack is gone) it
kills what the server left running, removes its shared memory and its private directory, and ends with the server's exit
code (128 + the number of the signal that killed it). All of this also happens when ditpack or the server are SIGKILLed.

It imports nothing of ditpack: it runs in an interpreter without site-packages.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_LOOK_SECONDS = 0.25  # how often it looks whether ditpack is still there
_REAP_SECONDS = 5.0


def remove_shared_memory(prefix: str) -> list[str]:
    """Remove the regions in /dev/shm whose names begin with ``prefix``; returns those names."""
    removed = []
    for region in _SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
        removed.append(region.name)
    return removed


def keep(owner: int, grace: float, prefix: str, directory: str, command: list[str]) -> int:
    """Run ``command`` until it ends, or until ``grace`` seconds after it was told to."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the server's orphans become ours, so none escapes the end
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def before_exec() -> None:  # safe here: the keeper has one thread
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, cwd=directory, process_group=0, preexec_fn=before_exec
    )
    print(server.pid, flush=True)
    deadline = None
    # Signals go out by os.kill: Popen's own would first wait for a server that has just ended, and its number, which is
    # its group's too, could then become somebody else's.
    while os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        received = signal.sigtimedwait(_SIGNALS, _LOOK_SECONDS)
        asked = received.si_signo if received else None
        if asked == signal.SIGQUIT or (deadline is not None and time.monotonic() > deadline):
            os.kill(server.pid, signal.SIGKILL)
        elif deadline is None and (asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) or os.getppid() != owner):
            os.kill(server.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
    os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    _end_children()
    return code if code >= 0 else 128 - code


def _end_children() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    deadline = time.monotonic() + _REAP_SECONDS
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if children.exists():
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)  # not waited for: the number is still that child's
        time.sleep(0.02)


def main() -> int:
    owner, grace, prefix, directory, *command = sys.argv[1:]
    try:
        return keep(int(owner), float(grace), prefix, directory, command)
    finally:
        remove_shared_memory(prefix)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
