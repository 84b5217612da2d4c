"""A sampler whose steps are taken by a group of worker processes, one a device, all of them alike.

Every rank begins the same members, builds the same packs and takes the same steps; inside the transformer each computes
its share. So what goes to them is a request once, the make-up of a pack when it changes, and a few bytes a step.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ditpack.packing.layout import Row
from ditpack.parallel.group import WorkerGroup, WorkersLost
from ditpack.parallel.messages import WorkerConfig
from ditpack.sampling.sampler import Sampler

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_ATTEMPTS = 5  # failed restarts in a row before the model stays refused
_BACKOFF_S = 2.0  # before the second attempt; doubles


@dataclass(eq=False)
class RemoteMember:
    """A request that the ranks of ``group`` know as ``key``."""

    group: WorkerGroup
    key: int
    request: Any
    rows: tuple[Row, ...]
    steps_left: int

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


@dataclass(eq=False)
class RemotePack:
    group: WorkerGroup
    members: Sequence[RemoteMember]
    steps_left: int
    pad_tokens: int  # in the flat order of all ranks


class ParallelSampler:
    """Starts the workers and waits until they are ready; ``close`` ends them.

    Args:
        planner: a sampler without weights, for what needs no device.
        timeout_s: the longest that a worker may take for a step, or show no sign of life, before the group is lost.
        restart: whether a lost group is started again; requests are refused until it is ready, or else for good.

    Raises:
        UnusableError: a setting that the model or a device cannot serve.
        CallFailed, WorkersLost: whatever else kept the workers from starting.
    """

    graph_replays = 0

    def __init__(self, planner: Sampler[Any, Any], config: WorkerConfig, timeout_s: float, restart: bool) -> None:
        self.eager_forwards = 0
        self._planner = planner
        self._config = config
        self._timeout_s = timeout_s
        self._restart = restart
        self._keys = itertools.count()
        self._group: WorkerGroup | None = None
        self._starting: WorkerGroup | None = None
        self._refusal = ""  # why there is no group
        self._failure: Exception | None = None  # of the first start
        self._started, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="ditpack-workers", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def device(self) -> torch.device:
        return torch.device(self._config.devices[0])

    @property
    def ready(self) -> bool:
        return self._group is not None and self._group.lost is None

    @property
    def pids(self) -> list[int]:
        """Of the workers; for whoever watches processes."""
        return self._group.pids if self._group else []

    def conditioning(self, request: Any, read: Callable[[str], Tensor]) -> Any:
        return self._planner.conditioning(request, read)

    def rows(self, request: Any, conditioning: Any) -> tuple[Row, ...]:
        self._live()
        return self._planner.rows(request, conditioning)

    def example(self, image_tokens: int) -> tuple[Any, Any]:
        return self._planner.example(image_tokens)

    def bind_thread(self) -> None:
        """Nothing: no device is used here."""

    def begin(self, request: Any, conditioning: Any) -> RemoteMember:
        group, key = self._live(), next(self._keys)
        try:
            rows, steps_left = group.call("begin", key, request, conditioning)[0]
        except Exception:
            group.forget(key)
            raise
        member = RemoteMember(group, key, request, rows, steps_left)
        weakref.finalize(member, group.forget, key).atexit = False
        return member

    def pack(self, members: Sequence[RemoteMember]) -> RemotePack:
        group = self._live()
        if any(member.group is not group for member in members):
            raise WorkersLost("the workers that had begun this request were lost")
        steps_left = group.call("lay_out", [member.key for member in members])[0]
        tokens = sum(member.tokens for member in members)
        shares = len(self._config.devices) if self._config.parallel == "tokens" else 1
        return RemotePack(group, members, steps_left, pad_tokens=-tokens % shares)

    def step(self, pack: RemotePack) -> None:
        self.eager_forwards += 1
        pack.steps_left, states = pack.group.call("step")[0]
        for member, (rows, steps_left) in zip(pack.members, states, strict=True):
            member.rows, member.steps_left = rows, steps_left

    def throttle(self) -> None:
        """Nothing: a worker answers a step when its device has finished the one before."""

    def check_device(self) -> None:
        """Wait for the devices. Raises when they are lost for good; workers that are being restarted do not count."""
        if self._group is not None and self._group.lost is None:
            self._group.call("check_device")
        elif not self._restart:
            self._live()

    def preview(self, member: RemoteMember) -> Callable[[], Tensor]:
        return self._latents(member, "preview")

    def finish(self, member: RemoteMember) -> Callable[[], Tensor]:
        return self._latents(member, "finish")

    def close(self) -> None:
        """End the workers, also those that are being started; none is left."""
        self._closing.set()
        if (starting := self._starting) is not None:
            starting.lose("not needed any more")
        self._thread.join()

    def _latents(self, member: RemoteMember, verb: str) -> Callable[[], Tensor]:
        future = member.group.latents(member.key, verb)

        def wait() -> Tensor:
            try:
                return future.result(self._timeout_s)
            except TimeoutError:
                raise WorkersLost(f"the latents did not come within {self._timeout_s:g} s") from None

        return wait

    def _live(self) -> WorkerGroup:
        """The group, if there is one that lives.

        Raises:
            WorkersLost: there is none, and why.
        """
        group = self._group
        if group is None:
            raise WorkersLost(self._refusal)
        if group.lost is not None:
            raise WorkersLost(f"the workers were lost: {group.lost}")
        return group

    # The supervisor's thread, which lives as long as any worker: the kernel kills them with it.

    def _supervise(self) -> None:
        group: WorkerGroup | None = None
        try:
            group = self._start()
        except Exception as error:
            self._failure = error
        finally:
            self._started.set()
        while group is not None:
            self._watch(group)
            group.close()
            if self._closing.is_set():
                return
            group = self._start_again(group.lost or "")

    def _start(self) -> WorkerGroup:
        group = self._starting = WorkerGroup(self._config, self._timeout_s)
        try:
            if not self._closing.is_set():  # set later, it finds the group
                group.wait_ready()
        except BaseException:
            group.close()
            raise
        finally:
            self._starting = None
        self._group = group
        return group

    def _watch(self, group: WorkerGroup) -> None:
        """Until it is lost, or not needed any more."""
        while group.lost is None and not self._closing.wait(_LOOK_S):
            group.look()

    def _start_again(self, reason: str) -> WorkerGroup | None:
        logger.error("the workers were lost: %s", reason)
        self._refusal = f"the workers were lost ({reason}) and are being restarted; try again later"
        if not self._restart:
            self._refusal = f"the workers were lost ({reason}); the model has to be loaded again"
        self._group = None
        for attempt in range(_ATTEMPTS if self._restart else 0):
            try:
                group = self._start()
            except Exception as error:
                if not self._closing.is_set():
                    logger.error("the workers could not be restarted: %s", error)
                if self._closing.wait(_BACKOFF_S * 2**attempt):
                    return None
            else:
                logger.info("the workers are ready again")
                return group
        if self._restart:
            self._refusal = f"the workers were lost and could not be restarted in {_ATTEMPTS} attempts"
        return None
