"""AdamW with a schedule by the clock and an average of the weights; nothing in it reads the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CLIP = 1.0  # of the gradients' norm
_WARM_UP = 200  # steps
_CONSTANT = 0.4  # of the time; then the learning rate falls to 0 in a line


class Optimiser:
    """``average``: how much of the averaged weights stays at each step."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        weight_decay: float = 0.0,
        average: float = 0.999,
    ) -> None:
        self._parameters = list(parameters)
        self._learning_rate = learning_rate
        self._average = average
        fused = self._parameters[0].device.type == "cuda"
        self._adam = torch.optim.AdamW(
            self._parameters, lr=learning_rate, betas=(0.9, 0.99), weight_decay=weight_decay, fused=fused
        )
        self._averaged = [parameter.detach().clone() for parameter in self._parameters]
        self.steps = 0

    def step(self, loss: Tensor, progress: float) -> None:
        """One step down ``loss``; ``progress`` is the share of the time that is over, 0 … 1."""
        warm = min(1.0, (self.steps + 1) / _WARM_UP)
        fallen = min(1.0, max(0.0, (1 - progress) / (1 - _CONSTANT)))
        for group in self._adam.param_groups:
            group["lr"] = self._learning_rate * warm * fallen
        self._adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, _CLIP)
        self._adam.step()
        self.steps += 1
        # Young averages forget faster, or the first weights would stay in them.
        keep = min(self._average, (self.steps + 1) / (self.steps + 20))
        with torch.no_grad():
            torch._foreach_lerp_(self._averaged, [parameter.detach() for parameter in self._parameters], 1 - keep)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters have their averaged values."""
        trained = [parameter.detach().clone() for parameter in self._parameters]
        self._set(self._averaged)
        try:
            yield
        finally:
            self._set(trained)

    def settle(self) -> None:
        """Give the parameters their averaged values for good."""
        self._set(self._averaged)

    def state(self) -> dict[str, Any]:
        return {"adam": self._adam.state_dict(), "averaged": self._averaged, "steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        with torch.no_grad():
            torch._foreach_copy_(self._averaged, state["averaged"])
        self.steps = state["steps"]

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        torch._foreach_copy_([parameter.data for parameter in self._parameters], values)
