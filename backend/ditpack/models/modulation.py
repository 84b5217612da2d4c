"""Modulation of all layers, computed once for each distinct timestep and kept.

A row's modulation depends on its timestep alone, and timesteps repeat: the branches of a request share theirs, requests
of one size and step count share a schedule, and in bfloat16 only about 730 timesteps exist between 20 and 1000. The
modulation layers hold a third of the model's weights, so not reading them at every step is worth the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Modulation:
    """(shift, scale, gate) of R rows for the attention, then the same for the MLP, of every layer.

    Where reference images have a modulation of their own, ``image`` and ``out`` have the 2R rows of ``Stream``.
    """

    image: Tensor  # [R, layers, 6, D]
    text: Tensor  # [R, layers, 6, D]
    out: Tensor  # [R, 2, D]: (scale, shift) of the output norm

    def rows(self, slots: Tensor, references: Tensor | None = None) -> Modulation:
        """The rows ``slots``, int64 [R].

        ``references``, int64 [1]: the row that all reference images take in the blocks. Their output norm, like the
        text, takes the modulation of ``slots``.
        """
        if references is None:
            return Modulation(self.image[slots], self.text[slots], self.out[slots])
        image = torch.stack((slots, references.expand_as(slots)), dim=1).flatten()
        return Modulation(self.image[image], self.text[slots], self.out[slots.repeat_interleave(2)])


class ModulationTable:
    """Keeps the modulation of up to ``capacity`` timesteps; the least recently asked for make room.

    Args:
        compute: timesteps [n] in the model's dtype → their modulation.
        capacity: about 4.4 MB each for the 20 B Qwen-Image in bfloat16.
    """

    def __init__(
        self, compute: Callable[[Tensor], Modulation], device: torch.device, dtype: torch.dtype, capacity: int
    ):
        self._compute = compute
        self._device, self._dtype = device, dtype
        self.capacity = capacity
        self._slots: dict[float, int] = {}  # in the order of their last use
        self._free = list(range(capacity))
        self._table: Modulation | None = None

    def slots(self, timesteps: Sequence[float]) -> list[int]:
        """The table rows of ``timesteps``, computing those that are missing. Valid until the next call.

        Raises:
            ValueError: for more than ``capacity`` distinct timesteps.
        """
        distinct = dict.fromkeys(timesteps)
        if len(distinct) > self.capacity:
            raise ValueError(f"{len(distinct)} timesteps do not fit in a table of {self.capacity}")
        for timestep in distinct:  # to the end of the order, so that what makes room below is not needed now
            if timestep in self._slots:
                self._slots[timestep] = self._slots.pop(timestep)
        missing = [timestep for timestep in distinct if timestep not in self._slots]
        for timestep in missing:
            slot = self._free.pop() if self._free else self._slots.pop(next(iter(self._slots)))
            self._slots[timestep] = slot
        if missing:
            self._fill(missing, [self._slots[timestep] for timestep in missing])
        return [self._slots[timestep] for timestep in timesteps]

    def rows(self, slots: Tensor, references: Tensor | None = None) -> Modulation:
        """The modulation of int64 ``slots`` [R], as ``Modulation.rows``."""
        assert self._table is not None, "slots() comes first"
        return self._table.rows(slots, references)

    def _fill(self, timesteps: list[float], slots: list[int]) -> None:
        computed = self._compute(torch.tensor(timesteps, dtype=self._dtype).to(self._device))
        if self._table is None:
            # Allocated once, so that its address holds for captured graphs.
            self._table = Modulation(
                *(
                    torch.empty((self.capacity, *part.shape[1:]), dtype=part.dtype, device=part.device)
                    for part in (computed.image, computed.text, computed.out)
                )
            )
        index = torch.tensor(slots).to(self._device)
        self._table.image[index] = computed.image
        self._table.text[index] = computed.text
        self._table.out[index] = computed.out
