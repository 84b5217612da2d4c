"""How the other processes of this host reach an engine: one JSON line in, JSON lines out, over a Unix socket.

An ensemble passes no cancel on to its steps, and nobody can ask a request how far it is; so each engine listens in a
directory that only this user may enter, and whoever knows a request's id may watch it or stop it.

    {"do": "cancel", "id": …} → {"found": bool}
    {"do": "watch", "id": …, "wait_s": …, "preview_every": …} → a line each time its ``Progress`` changes, until it ends
    {"do": "status"} → {"healthy": bool, "refusal": why it takes nothing any more or null, "active": …, "waiting": …}
    {"do": "drain", "wait_s": …} → {"idle": bool} once all that was accepted is answered
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import socket
import socketserver
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the models that only ask need no torch
    from ditpack.engine.engine import Engine
    from ditpack.engine.job import Progress

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "DITPACK_RUN_DIR"
_WATCHERS = 256  # at a time; what comes on top is not told
_LONGEST_LINE = 4096  # bytes, of a command
_LONGEST_ANSWER = 16 * 2**20  # bytes; a preview is a few ten thousand
_ASK_S = 10.0  # for a short answer
_POLL_S = 0.1  # the longest that closing waits for the listener to see it


def run_directory() -> Path:
    """Where engines listen: $DITPACK_RUN_DIR, else a directory of this user's and this server's own.

    The models of a server are its children, so they agree on it.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"ditpack-{os.getuid()}-{os.getppid()}"


class EngineChannel:
    """Listens for ``engine`` at ``directory``/``name``.sock until closed.

    ``picture`` turns a preview's latents into a JPEG file as base64 text; it runs on the watcher's own thread.

    Raises:
        OSError: nobody can listen there, or others could enter the directory.
    """

    def __init__(self, engine: Engine, directory: Path, name: str, picture: Callable[[Any], str]) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
        if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise PermissionError(f"{directory} must belong to this user, and nobody else may write there")
        self.path = directory / f"{name}.sock"
        self.path.unlink(missing_ok=True)  # of one that was killed, or that this one replaces
        slots = threading.BoundedSemaphore(_WATCHERS)

        class Handler(socketserver.StreamRequestHandler):
            timeout = _ASK_S  # for the line to arrive and for each answer to be taken

            def handle(self) -> None:
                try:
                    command = json.loads(self.rfile.readline(_LONGEST_LINE))
                    if command["do"] != "watch":
                        self._send(_answer(engine, command))
                    elif slots.acquire(blocking=False):
                        try:
                            self._watch(str(command["id"]), float(command["wait_s"]), int(command["preview_every"]))
                        finally:
                            slots.release()
                except (OSError, ValueError, KeyError, TypeError) as error:  # they are gone, or talk nonsense
                    logger.debug("channel: %s", error)

            def _send(self, answer: dict[str, Any]) -> None:
                self.wfile.write(json.dumps(answer).encode() + b"\n")

            def _watch(self, request_id: str, wait_s: float, preview_every: int) -> None:
                shown = 0
                for progress in engine.watch(request_id, wait_s, preview_every, self._is_gone):
                    line = _line(progress)
                    if progress.preview is not None and progress.preview[0] > shown:
                        shown, latents = progress.preview
                        try:
                            line |= {"preview_step": shown, "preview": picture(latents())}
                        except Exception as error:  # a picture less, not the rest of the story
                            logger.warning("request %s: no preview", request_id, exc_info=error)
                    self._send(line)

            def _is_gone(self) -> bool:
                """Whether the other side hung up: it has nothing more to say, so all that can be read is the end."""
                poll = select.poll()
                poll.register(self.connection, select.POLLIN)
                return bool(poll.poll(0))

        with _address(self.path) as address:
            self._server = _Server(address, Handler)
        self._file = self.path.stat().st_ino
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="ditpack-channel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Watchers end with their requests."""
        self._server.shutdown()
        self._server.server_close()
        with contextlib.suppress(OSError):
            # A model that is loaded again listens under the same name before the old one has ended.
            if self.path.stat().st_ino == self._file:
                self.path.unlink()
            self.path.parent.rmdir()  # the last one takes it away


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


def _answer(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    match command["do"]:
        case "cancel":
            return {"found": engine.cancel(str(command["id"]))}
        case "status":
            return {
                "healthy": engine.healthy,
                "refusal": engine.refusal,
                "active": engine.active_requests,
                "waiting": engine.waiting_requests,
            }
        case "drain":
            return {"idle": engine.drain(float(command["wait_s"]))}
    raise ValueError(command["do"])


def _line(progress: Progress) -> dict[str, Any]:
    return {
        "step": progress.step,
        "steps": progress.steps,
        "position": progress.position,
        "seconds": round(progress.seconds, 3),
    }


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """``path`` within the 107 bytes that a Unix socket's address may have, however deep its directory is."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def sockets(directory: Path) -> list[Path]:
    """Of the engines that listen there, dead ones included."""
    return sorted(directory.glob("*.sock"))


def ask(path: Path, command: dict[str, Any], timeout: float = _ASK_S) -> dict[str, Any] | None:
    """The first answer to ``command``, or None when nobody answers within ``timeout`` seconds."""
    try:
        with socket.socket(socket.AF_UNIX) as connection, _address(path) as address:
            connection.settimeout(timeout)
            connection.connect(address)
            connection.sendall(json.dumps(command).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile("rb").readline())
            return answer
    except (OSError, ValueError):  # nobody there, or killed while answering
        return None


def cancel(directory: Path, request_id: str) -> bool:
    """Tell every engine there; whether one had the request."""
    answers = [ask(path, {"do": "cancel", "id": request_id}) for path in sockets(directory)]
    return any(answer["found"] for answer in answers if answer)


def status(directory: Path) -> list[dict[str, Any]]:
    """What each engine there says of itself, with its name; one that does not answer is not healthy."""
    silent = {"healthy": False, "refusal": "its process does not answer", "active": 0, "waiting": 0}
    return [{"name": path.stem, **(ask(path, {"do": "status"}) or silent)} for path in sockets(directory)]


async def watch(path: Path, request_id: str, wait_s: float, preview_every: int) -> AsyncIterator[dict[str, Any]]:
    """What one engine has to say of a request, until it ends; nothing when it never gets it or is gone."""
    try:
        with _address(path) as address:
            reader, writer = await asyncio.open_unix_connection(address, limit=_LONGEST_ANSWER)
    except OSError:
        return
    try:
        command = {"do": "watch", "id": request_id, "wait_s": wait_s, "preview_every": preview_every}
        writer.write(json.dumps(command).encode() + b"\n")
        while line := await reader.readline():
            yield json.loads(line)
    except (OSError, ValueError):  # it was killed
        return
    finally:
        writer.close()


def drain(directory: Path, timeout: float) -> bool:
    """Have every engine there refuse new requests and finish the others; whether all did within ``timeout`` seconds."""
    paths = sockets(directory)
    results: list[dict[str, Any] | None] = [None] * len(paths)

    def wait(index: int) -> None:
        results[index] = ask(paths[index], {"do": "drain", "wait_s": timeout}, timeout + _ASK_S)

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(result is not None and result["idle"] for result in results)
