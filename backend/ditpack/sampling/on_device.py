"""The device of a sampler: staying in step with it without reading from it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class OnDevice:
    """What every sampler does with its device, whatever the model. On a CPU there is nothing to do."""

    ready = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph_replays = 0  # for a sampler with graphs to count
        self.eager_forwards = 0  # for every sampler to count
        self._previous_step: torch.cuda.Event | None = None

    def bind_thread(self) -> None:
        """Make this sampler's device the calling thread's own; kernels launch on the thread's device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def throttle(self) -> None:
        """Wait until the device has finished the step before the one just enqueued.

        Without it the host, which reads nothing back, would run ahead by whole images and cancel or admit too late.
        """
        if self.device.type != "cuda":
            return
        if self._previous_step is not None:
            self._previous_step.synchronize()
        self._previous_step = torch.cuda.Event()
        self._previous_step.record()

    def check_device(self) -> None:
        """Raise if the device can no longer be used; called after a failed step only."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Nothing: what it holds goes with it."""

    def to_host(self, latents: Tensor) -> Callable[[], Tensor]:
        """Start copying ``latents`` to the host; the returned function waits for the copy, on any thread."""
        if self.device.type != "cuda":
            return lambda: latents
        host = torch.empty(latents.shape, dtype=latents.dtype, pin_memory=True)
        host.copy_(latents, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> Tensor:
            arrived.synchronize()
            return host

        return wait
