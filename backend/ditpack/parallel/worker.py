"""One rank: a process that holds a sampler on one device and does with it what the engine's process tells it.

Started by ``group.WorkerGroup`` with one end of a socket pair. It ends when told to, when the other end closes, and, by
way of the kernel, when its parent dies.
"""

from __future__ import annotations

import ctypes
import datetime
import logging
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ditpack.models.checkpoint import CheckpointError
from ditpack.models.families import UnusableError, load_sampler
from ditpack.models.qwen_image import QwenImageTransformer
from ditpack.parallel.messages import BEAT_S, Failure, WorkerConfig
from ditpack.parallel.rows import share_rows
from ditpack.parallel.ulysses import Ulysses
from ditpack.sampling.sampler import Sampler

_PR_SET_PDEATHSIG = 1
_EXAMPLE_TOKENS = 64  # of the step that warms up the kernels before the first request comes


class Outbox(logging.Handler):
    """Sends what the worker has to say from a thread of its own: answers, results when they are there, log, beats."""

    def __init__(self, channel: Connection) -> None:
        super().__init__()
        self._channel = channel
        self._messages: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ditpack-outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        self._messages.put(lambda: message)

    def put_when_there(self, message: Callable[[], Any]) -> None:
        self._messages.put(message)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.put(("log", record.levelno, record.name, self.format(record)))
        except Exception:  # logging's own way to report that logging failed
            self.handleError(record)

    def end(self) -> None:
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                message = self._messages.get(timeout=BEAT_S)
            except queue.Empty:
                message = _beat
            if message is None:
                return
            try:
                self._channel.send_bytes(pickle.dumps(message()))
            except OSError:  # nobody is there any more
                os._exit(1)


def _beat() -> tuple[str]:
    return ("beat",)


def main() -> None:
    channel_fd, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground; the parent says what follows
    channel = Connection(channel_fd)
    outbox = Outbox(channel)
    try:
        config: WorkerConfig = pickle.loads(channel.recv_bytes())
        _log_to(outbox, config.rank)
        try:
            sampler = _load(config)
        except (CheckpointError, UnusableError, RuntimeError, ValueError, OSError) as error:
            setting = getattr(error, "setting", None)
            outbox.put(("answer", 0, Failure(f"{config.device}: {error}", traceback.format_exc(), setting)))
            outbox.end()
            os._exit(1)  # the group may be half built, and taking it down would wait for the others
        outbox.put(("answer", 0, None))
        Worker(config, sampler, channel, outbox).serve()
    except EOFError:
        os._exit(1)
    dist.destroy_process_group()
    outbox.end()
    os._exit(0)  # nothing is left to do, and taking the interpreter down takes a second


def _log_to(outbox: Outbox, rank: int) -> None:
    """One rank's word is enough, unless something failed."""
    root = logging.getLogger("ditpack")
    root.addHandler(outbox)
    root.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    root.propagate = False


def _load(config: WorkerConfig) -> Sampler[Any, Any]:
    device = torch.device(config.device)
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise UnusableError("devices", f"PyTorch sees {torch.cuda.device_count()} GPUs here")
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // len(config.devices)))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{config.store}",
        rank=config.rank,
        world_size=len(config.devices),
        timeout=datetime.timedelta(seconds=config.collective_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    sampler: Any = load_sampler(config.checkpoint, device, config.dtype, config.attention, config.quantization)
    sampler.run_eagerly()
    parallelise(sampler.transformer, config)
    return sampler


def parallelise(transformer: QwenImageTransformer, config: WorkerConfig) -> None:
    group = dist.group.WORLD
    assert group is not None
    if config.parallel == "rows":
        share_rows(transformer, group)
    else:
        Ulysses(transformer, group, config.sp_padding)


class Worker:
    """Carries out calls, one after the other, in the order in which every rank gets them."""

    def __init__(self, config: WorkerConfig, sampler: Sampler[Any, Any], channel: Connection, outbox: Outbox) -> None:
        self._config = config
        self._sampler = sampler
        self._channel = channel
        self._outbox = outbox
        self._members: dict[int, Any] = {}
        self._pack: Any = None
        self._packed: list[Any] = []

    def serve(self) -> None:
        """Until ``close``. Raises EOFError when the parent is gone."""
        self._sampler.bind_thread()
        while True:
            number, verb, arguments, forgotten = pickle.loads(self._channel.recv_bytes())
            for key in forgotten:
                self._members.pop(key, None)
            if verb == "close":
                return
            try:
                result = getattr(self, f"_{verb}")(*arguments)
            except Exception as error:  # whatever it was, it is the call's answer
                result = Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
            self._outbox.put(("answer", number, result))

    def _warm_up(self) -> None:
        """The first step, in which kernels are compiled."""
        self._sampler.step(self._sampler.pack([self._sampler.begin(*self._sampler.example(_EXAMPLE_TOKENS))]))
        self._sampler.check_device()

    def _begin(self, key: int, request: Any, conditioning: Any) -> Any:
        self._members[key] = member = self._sampler.begin(request, conditioning)
        return _state(member)

    def _lay_out(self, keys: list[int]) -> Any:
        self._packed = [self._members[key] for key in keys]
        self._pack = self._sampler.pack(self._packed)
        return self._pack.steps_left

    def _step(self) -> Any:
        self._sampler.step(self._pack)
        self._sampler.throttle()
        return self._pack.steps_left, [_state(member) for member in self._packed]

    def _check_device(self) -> None:
        self._sampler.check_device()

    def _send_latents(self, ticket: int, key: int, verb: str) -> None:
        if self._config.rank == 0:
            there = getattr(self._sampler, verb)(self._members[key])
            self._outbox.put_when_there(lambda: ("latents", ticket, there().numpy()))


def _state(member: Any) -> tuple[Any, int]:
    return member.rows, member.steps_left


if __name__ == "__main__":
    main()
