"""``TritonServer``: one real tritonserver process, from its checks before the start to its last trace."""

from __future__ import annotations

import http.client
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ditpack.engine import channel
from ditpack.models.checkpoint import open_checkpoint
from ditpack.tritonserver.launch import keeper
from ditpack.tritonserver.launch.find import find_tritonserver
from ditpack.tritonserver.launch.interpreter import check_interpreter
from ditpack.tritonserver.launch.log import find_failure, last_error
from ditpack.tritonserver.launch.ports import take_ports
from ditpack.tritonserver.launch.prepare import Settings, command_line, environment, prepare_directory, run_directory
from ditpack.tritonserver.launch.repository import find_repository, imports_ditpack, models_for
from ditpack.tritonserver.launch.serve_error import ServeError
from ditpack.tritonserver.launch.watchdog import LOOK_S, Watchdog

EXIT_TIMEOUT = 60
READY_TIMEOUT = 600.0
_POLL_SECONDS = 0.1
_AFTER_EXIT_TIMEOUT = 15.0  # what tritonserver may take beyond its own exit timeout before it is killed
_AFTER_TROUBLE = 5.0  # for what can still be answered when a part of the server is dead
_KILLED_SECONDS = 15.0  # for the keeper to clean up after a kill
_LONGEST_LOG = 4 * 2**20  # bytes of the log that are read for a reason


class TritonServer:
    """A tritonserver that serves ``model_repository`` (None: ditpack's own) with ``checkpoint``.

    As a context manager it starts at the beginning and stops at the end; call ``wait_ready`` in between. ``checkpoint``
    None or "auto" is ``$DITPACK_CHECKPOINT`` or the embedded one. A port of 0 becomes a free one. ``log`` None is a
    temporary file, kept only if the server failed; a named file is appended to. ``options`` go to tritonserver as is.
    """

    def __init__(
        self,
        model_repository: Path | None = None,
        checkpoint: str | Path | None = None,
        host: str = "127.0.0.1",
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        log: Path | None = None,
        *,
        weights: str = "auto",
        tritonserver: str | Path | None = None,
        exit_timeout: int = EXIT_TIMEOUT,
        options: tuple[str, ...] = (),
    ) -> None:
        self.host = host
        self.http_port, self.grpc_port, self.metrics_port = http_port, grpc_port, metrics_port
        self.log = log
        self.pid: int | None = None
        self.models: list[str] = []
        self.shm_prefix = f"ditpack_{secrets.token_hex(6)}_"
        self._repository = model_repository
        self._checkpoint = checkpoint
        self._weights = weights
        self._tritonserver = tritonserver
        self._exit_timeout = exit_timeout
        self._options = options
        self._temporary_log = log is None
        self._log_start = 0
        self._directory: Path | None = None
        self._keeper: subprocess.Popen[str] | None = None

    @property
    def http_url(self) -> str:
        """http://host:port"""
        return f"http://{self._address(self.http_port)}"

    @property
    def grpc_url(self) -> str:
        """host:port, as gRPC clients take it"""
        return self._address(self.grpc_port)

    @property
    def metrics_url(self) -> str:
        """http://host:port/metrics"""
        return f"http://{self._address(self.metrics_port)}/metrics"

    @property
    def running(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    def start(self) -> None:
        """Check everything that can be checked, then start the server; does nothing if it runs.

        Raises:
            ServeError: nothing was started.
            CheckpointError: likewise; the checkpoint cannot be served.
        """
        if self.running:
            return
        checkpoint = open_checkpoint(self._checkpoint, self._weights)
        repository = find_repository(self._repository)
        self.models = models_for(repository, checkpoint.family)
        installation = find_tritonserver(self._tritonserver)
        check_interpreter(needs_ditpack=imports_ditpack(repository))
        wanted = {"--http-port": self.http_port, "--grpc-port": self.grpc_port, "--metrics-port": self.metrics_port}
        ports = take_ports(self.host, wanted)
        self.http_port, self.grpc_port, self.metrics_port = ports.values()

        self._directory = directory = Path(tempfile.mkdtemp(prefix="ditpack-"))
        try:
            installation = prepare_directory(installation, directory)
            settings = Settings(
                repository,
                self.models,
                self.host,
                ports,
                self._exit_timeout,
                self.shm_prefix,
                self._options,
            )
            with self._open_log() as log:
                self._keeper = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", keeper.__file__),
                        *(str(os.getpid()), str(self._exit_timeout + _AFTER_EXIT_TIMEOUT)),
                        *(self.shm_prefix, str(directory)),
                        *command_line(installation, settings),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment(installation, directory, checkpoint, os.environ),
                    start_new_session=True,  # Ctrl-C reaches ditpack alone, which passes it on as it sees fit
                )
        except BaseException:
            self._ended()
            raise
        assert self._keeper.stdout is not None
        with self._keeper.stdout as pipe:
            line = pipe.readline()
        if not line:
            raise self._failed()
        self.pid = int(line)

    def wait_ready(self, timeout: float = READY_TIMEOUT) -> None:
        """Block until the server and each of its models say that they are ready, at most ``timeout`` seconds.

        Raises:
            ServeError: with the reason in two lines; the server has been stopped then.
        """
        deadline = time.monotonic() + timeout
        waiting = self.models
        while True:
            if not self.running or find_failure(self._read_log()) is not None:
                raise self._failed()
            waiting = [model for model in waiting if not self._answers(f"/v2/models/{model}/ready")]
            if not waiting and self._answers("/v2/health/ready"):
                return
            if time.monotonic() > deadline:
                self.kill()
                log = self._keep_log()
                raise ServeError(
                    f"tritonserver was not ready after {timeout:g} s; not ready: {', '.join(waiting) or 'the server'}.",
                    f"Allow more time (--ready-timeout) if it was still loading. Full log: {log}",
                )
            time.sleep(_POLL_SECONDS)

    def wait(self, watch: bool = False) -> None:
        """Block while the server runs. ``watch``: end it when a model's process or an engine in it is dead, since it
        would go on as if nothing had happened.

        Raises:
            ServeError: it ended although nobody stopped it, or was ended for that reason.
        """
        if self._keeper is None:
            return
        watchdog = (
            Watchdog(self.pid, run_directory(self._directory)) if watch and self.pid and self._directory else None
        )
        while True:
            try:
                self._keeper.wait(LOOK_S if watchdog else None)
            except subprocess.TimeoutExpired:
                assert watchdog is not None
                if (trouble := watchdog.trouble()) is None:
                    continue
                if not self.running:  # that is what the watchdog saw
                    raise self._failed() from None
                log = self._keep_log()
                self.stop(_AFTER_TROUBLE)
                raise ServeError(
                    f"The server could not go on: {trouble}.",
                    f"It has been stopped, to be started again by whoever started it. Full log: {log}",
                ) from None
            raise self._failed()

    def stop(self, timeout: float | None = None) -> None:
        """End the server: let it finish what is in flight for at most ``timeout`` seconds (None: its exit timeout and a
        little), then kill it. Afterwards no process and no shared memory of it is left. Harmless if it does not run.
        """
        if self._keeper is None:
            return
        if self.running:
            if timeout is None and self._directory is not None:
                # Triton refuses the steps that are still to come of requests in flight, once it is told to end.
                channel.drain(run_directory(self._directory), self._exit_timeout)
            self._keeper.send_signal(signal.SIGTERM)
            try:
                self._keeper.wait(self._exit_timeout + _AFTER_EXIT_TIMEOUT + 1 if timeout is None else timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        self._ended()
        if self._temporary_log and self.log is not None:
            self.log.unlink(missing_ok=True)
            self.log = None

    def kill(self) -> None:
        """End the server at once, whatever is in flight."""
        if self._keeper is None:
            return
        if self.running:
            self._keeper.send_signal(signal.SIGQUIT)
            try:
                self._keeper.wait(_KILLED_SECONDS)
            except subprocess.TimeoutExpired:
                self._keeper.kill()  # takes the server with it
                self._keeper.wait()
        self._ended()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _address(self, port: int) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _answers(self, path: str) -> bool:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        connection = http.client.HTTPConnection(host, self.http_port, timeout=5.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _open_log(self) -> IO[bytes]:
        if self._temporary_log:
            descriptor, name = tempfile.mkstemp(prefix="ditpack-", suffix=".log")
            self.log = Path(name)
            return os.fdopen(descriptor, "wb")
        assert self.log is not None
        try:
            file = self.log.open("ab")
        except OSError as error:
            raise ServeError(f"--log {self.log}: {error.strerror}.", "Name a file that can be written.") from None
        self._log_start = self.log.stat().st_size if self.log.is_file() else 0
        return file

    def _read_log(self) -> str:
        if self.log is None or not self.log.is_file():  # /dev/stdout, say, cannot be read back
            return ""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read(_LONGEST_LOG).decode("utf-8", "replace")

    def _keep_log(self) -> Path | None:
        """From here on ``stop`` leaves the log where it is."""
        self._temporary_log = False
        return self.log

    def _failed(self) -> ServeError:
        """Stop what still runs and say why it did not work."""
        assert self._keeper is not None
        if self.running:
            time.sleep(_POLL_SECONDS)  # the rest of what it is just writing
            failure = find_failure(self._read_log())
            self.kill()
        else:
            failure = find_failure(self._read_log())
        self._ended()
        log = self._keep_log()
        if failure is None:
            code = self._keeper.returncode
            how = f"was killed by {signal.Signals(code - 128).name}" if code > 128 else f"ended with exit code {code}"
            guess = last_error(self._read_log())
            return ServeError(f"tritonserver {how}{f': {guess}' if guess else ''}.", f"Full log: {log}")
        where = f"At {failure.where}. " if failure.where else ""
        others = f"Also failed: {', '.join(failure.others)}. " if failure.others else ""
        return ServeError(failure.reason, f"{where}{others}Full log: {log}")

    def _ended(self) -> None:
        """Remove what is left; the keeper did so already, unless it was killed itself."""
        keeper.remove_shared_memory(self.shm_prefix)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self.pid = None
