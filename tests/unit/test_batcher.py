"""Whose turn it is: a token budget, least remaining work first, gaps filled, nobody starved."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ditpack.packing.batcher import VarlenSequenceBatcher


@dataclass(eq=False)
class Request:
    tokens: int
    steps: int = 10
    done: int = 0
    skipped: int = 0
    priority: int = 2

    @property
    def steps_left(self) -> int:
        return self.steps - self.done


def test_everybody_while_they_fit() -> None:
    requests = [Request(40), Request(20), Request(40)]
    assert VarlenSequenceBatcher(100).select(requests) == requests
    assert [request.skipped for request in requests] == [0, 0, 0]


def test_equal_requests_go_in_the_order_they_came() -> None:
    requests = [Request(40), Request(40), Request(40)]
    assert VarlenSequenceBatcher(100).select(requests) == requests[:2]
    assert [request.skipped for request in requests] == [0, 0, 1]


def test_least_remaining_work_first() -> None:
    large, nearly_done, small = Request(80, steps=10), Request(80, steps=10, done=8), Request(80, steps=3)
    assert VarlenSequenceBatcher(100).select([large, nearly_done, small]) == [nearly_done]
    assert VarlenSequenceBatcher(100).select([large, small]) == [small]


def test_what_is_begun_is_finished_before_its_equals() -> None:
    """Each step lowers what is left, so two equal requests do not take turns."""
    first, second = Request(80), Request(80)
    batcher = VarlenSequenceBatcher(100)
    for _ in range(first.steps):
        assert batcher.select([first, second]) == [first]
        first.done += 1


def test_small_ones_fill_the_gap() -> None:
    shortest, large, filler = Request(60, steps=1), Request(60, steps=5), Request(40, steps=50)
    assert VarlenSequenceBatcher(100).select([shortest, large, filler]) == [shortest, filler]


def test_larger_than_the_budget_runs_alone() -> None:
    batcher = VarlenSequenceBatcher(100)
    huge, small = Request(500, steps=1), Request(1, steps=600)
    assert batcher.select([huge, small]) == [huge]
    assert batcher.select([Request(500), Request(1)])[0].tokens == 1


def test_nobody_starves() -> None:
    """A large request under a stream of small ones that never ends waits patience x its own steps, then runs."""
    batcher = VarlenSequenceBatcher(100, patience=2)
    large, waited = Request(90, steps=10), 0
    while large.steps_left:
        if large in batcher.select([large, Request(50, steps=1), Request(50, steps=1)]):
            large.done += 1
        else:
            waited += 1
            assert waited <= 2 * 10
    assert waited == 2 * 10


def test_the_patient_go_oldest_first() -> None:
    older, newer = Request(90, steps=50, skipped=800), Request(90, steps=2, skipped=800)
    assert VarlenSequenceBatcher(100).select([older, newer, Request(90, steps=1)]) == [older]


def test_no_requests_no_step() -> None:
    assert VarlenSequenceBatcher(100).select([]) == []


@pytest.mark.parametrize(("budget", "patience"), [(0, 1), (-5, 1), (1, -1)])
def test_bad_settings_are_refused(budget: int, patience: float) -> None:
    with pytest.raises(ValueError, match="must"):
        VarlenSequenceBatcher(budget, patience)


def test_priorities_go_before_work() -> None:
    batcher = VarlenSequenceBatcher(100)
    low, usual, high = Request(10, steps=1, priority=3), Request(60, steps=5), Request(60, steps=50, priority=1)
    assert batcher.select([low, usual, high]) == [low, high], "what is left over goes to whoever fits"
    assert batcher.select([Request(90, priority=3), usual, high]) == [high]


def test_low_priorities_do_not_starve() -> None:
    batcher = VarlenSequenceBatcher(100, patience=2)
    low, high = Request(100, steps=3, priority=3), Request(100, steps=1000, priority=1)
    turns = [batcher.select([low, high])[0] for _ in range(7)]
    assert turns == [high] * 6 + [low]
