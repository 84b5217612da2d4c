"""Admission: a token budget, oldest first, gaps filled, nobody starved."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ditpack.packing.batcher import VarlenSequenceBatcher


@dataclass(eq=False)
class Waiting:
    tokens: int
    overtaken: int = 0


def test_oldest_first_within_the_budget() -> None:
    waiting = [Waiting(40), Waiting(40), Waiting(40)]
    assert VarlenSequenceBatcher(100).select(0, waiting) == waiting[:2]


def test_what_is_in_flight_counts() -> None:
    waiting = [Waiting(40)]
    assert VarlenSequenceBatcher(100).select(60, waiting) == waiting
    assert VarlenSequenceBatcher(100).select(61, waiting) == []


def test_small_ones_fill_the_gap() -> None:
    waiting = [Waiting(80), Waiting(70), Waiting(20)]
    assert VarlenSequenceBatcher(100).select(0, waiting) == [waiting[0], waiting[2]]
    assert waiting[1].overtaken == 1


def test_larger_than_the_budget_runs_alone() -> None:
    batcher = VarlenSequenceBatcher(100)
    huge, small = Waiting(500), Waiting(1)
    assert batcher.select(0, [huge, small]) == [huge]
    assert batcher.select(500, [small]) == []
    assert batcher.select(1, [huge]) == []


def test_nobody_is_overtaken_for_ever() -> None:
    batcher = VarlenSequenceBatcher(100, max_overtaken=3)
    large, active, admitted = Waiting(90), 50, 0
    for _ in range(50):  # small requests keep coming; each leaves after its round
        joined = batcher.select(active, [large, Waiting(40)])
        admitted += len(joined)
        if not joined:
            break
    assert admitted == 3
    assert batcher.select(0, [large, Waiting(40)]) == [large]


@pytest.mark.parametrize(("budget", "overtaken"), [(0, 1), (-5, 1), (1, -1)])
def test_bad_settings_are_refused(budget: int, overtaken: int) -> None:
    with pytest.raises(ValueError, match="must"):
        VarlenSequenceBatcher(budget, overtaken)
