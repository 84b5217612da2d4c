"""AdamW and Muon with a schedule by the clock and an average of the weights; nothing in it reads the device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ditpack.demo_model.train.muon import Muon

_CLIP = 1.0  # of the gradients' norm
_WARM_UP = 200  # steps
_CONSTANT = 0.4  # of the time; then the learning rate falls to 0 in a line


class Optimiser:
    """``average``: how much of the averaged weights stays at each step.

    Weights of two and more dimensions whose names ``hidden`` finds, kernels of convolutions too, are trained by Muon at
    ``hidden_rate``, which is in the units of AdamW's; all others by AdamW. Muon is for what neither reads the input nor
    writes the output.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        learning_rate: float,
        weight_decay: float = 0.0,
        average: float = 0.999,
        hidden: re.Pattern[str] | None = None,
        hidden_rate: float = 0.0,
    ) -> None:
        others: list[nn.Parameter] = []
        self._matrices: list[nn.Parameter] = []
        for name, weight in named:
            (self._matrices if hidden and weight.dim() >= 2 and hidden.search(name) else others).append(weight)
        self._parameters = [*others, *self._matrices]
        self._average = average
        adam = torch.optim.AdamW(
            others,
            lr=learning_rate,
            betas=(0.9, 0.99),
            weight_decay=weight_decay,
            fused=self._parameters[0].device.type == "cuda",
        )
        self._rates: list[tuple[torch.optim.Optimizer, float]] = [(adam, learning_rate)]
        self._views = [nn.Parameter(_as_matrix(weight, weight)) for weight in self._matrices]
        if self._views:
            muon = Muon(self._views, hidden_rate, weight_decay)
            self._rates.append((muon, hidden_rate))
        self._averaged = [parameter.detach().clone() for parameter in self._parameters]
        self.steps = 0

    def step(self, loss: Tensor, progress: float) -> None:
        """One step down ``loss``; ``progress`` is the share of the time that is over, 0 … 1."""
        warm = min(1.0, (self.steps + 1) / _WARM_UP)
        fallen = min(1.0, max(0.0, (1 - progress) / (1 - _CONSTANT)))
        for optimiser, rate in self._rates:
            for group in optimiser.param_groups:
                group["lr"] = rate * warm * fallen
        for parameter in self._parameters:
            parameter.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, _CLIP)
        for view, weight in zip(self._views, self._matrices, strict=True):
            view.grad = None if weight.grad is None else _as_matrix(weight.grad, weight)
        for optimiser, _ in self._rates:
            optimiser.step()
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
        moments = [optimiser.state_dict() for optimiser, _ in self._rates]
        return {"moments": moments, "averaged": self._averaged, "steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        for (optimiser, _), moments in zip(self._rates, state["moments"], strict=True):
            optimiser.load_state_dict(moments)
        with torch.no_grad():
            torch._foreach_copy_(self._averaged, state["averaged"])
        self.steps = state["steps"]

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        torch._foreach_copy_([parameter.data for parameter in self._parameters], values)


def _as_matrix(values: Tensor, weight: Tensor) -> Tensor:
    """``values``, of a linear layer or a 2-D convolution, as a matrix; ``weight`` itself without a copy.

    The order of its columns, which Muon does not care about, is that of ``weight`` in memory.
    """
    if weight.is_contiguous():
        return values.detach().reshape(len(values), -1)
    return values.detach().permute(0, 2, 3, 1).reshape(len(values), -1)  # channels_last
