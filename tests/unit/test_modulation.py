"""The modulation table: each timestep once, the least recently used makes room, never what is needed now."""

from __future__ import annotations

import pytest
import torch

from ditpack.models.modulation import Modulation, ModulationTable


class Counting:
    """Computes a modulation that shows its timestep, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def __call__(self, timesteps: torch.Tensor) -> Modulation:
        self.asked += timesteps.tolist()
        value = timesteps.view(-1, 1, 1, 1)
        return Modulation(value.expand(-1, 2, 6, 4), 10 * value.expand(-1, 2, 6, 4), value[:, 0].expand(-1, 2, 4))


def table(capacity: int) -> tuple[ModulationTable, Counting]:
    compute = Counting()
    return ModulationTable(compute, torch.device("cpu"), torch.float32, capacity), compute


def values(modulation: ModulationTable, timesteps: list[float]) -> list[float]:
    rows = modulation.rows(torch.tensor(modulation.slots(timesteps)))
    assert torch.equal(rows.text, 10 * rows.image)
    assert torch.equal(rows.out[:, 0, 0], rows.image[:, 0, 0, 0])
    return rows.image[:, 1, 5, 3].tolist()


def test_each_timestep_is_computed_once() -> None:
    modulation, compute = table(8)
    assert values(modulation, [0.5, 0.25, 0.5]) == [0.5, 0.25, 0.5]
    assert values(modulation, [0.25, 1.0]) == [0.25, 1.0]
    assert compute.asked == [0.5, 0.25, 1.0]


def test_the_least_recently_used_makes_room() -> None:
    modulation, compute = table(3)
    values(modulation, [1.0, 2.0, 3.0])
    values(modulation, [1.0])
    assert values(modulation, [4.0]) == [4.0]
    assert values(modulation, [1.0, 3.0, 4.0]) == [1.0, 3.0, 4.0]
    assert compute.asked == [1.0, 2.0, 3.0, 4.0]


def test_what_is_needed_now_is_never_replaced() -> None:
    modulation, _ = table(3)
    values(modulation, [1.0, 2.0, 3.0])
    assert values(modulation, [1.0, 5.0, 6.0]) == [1.0, 5.0, 6.0]
    assert values(modulation, [6.0, 2.0, 1.0]) == [6.0, 2.0, 1.0]


def test_more_than_fit_is_refused() -> None:
    modulation, _ = table(2)
    with pytest.raises(ValueError, match="3 timesteps do not fit in a table of 2"):
        modulation.slots([1.0, 2.0, 3.0])
