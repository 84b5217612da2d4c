"""The varlen sequence batcher: which waiting requests join the pack, counted in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Sized(Protocol):
    """A waiting request as the batcher sees it."""

    tokens: int  # all its rows together
    overtaken: int  # how many younger requests have joined before it; the batcher counts


SizedT = TypeVar("SizedT", bound=Sized)


class VarlenSequenceBatcher:
    """Admits requests, oldest first, while the pack stays within ``token_budget`` tokens.

    A request that does not fit is passed over, and smaller, younger ones may fill the gap; after ``max_overtaken`` of
    them nobody passes it any more, so the pack drains until it fits. A request larger than the whole budget runs alone.

    Raises:
        ValueError: if ``token_budget`` is below 1 or ``max_overtaken`` is negative.
    """

    def __init__(self, token_budget: int, max_overtaken: int = 16) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget = {token_budget}: must be at least 1")
        if max_overtaken < 0:
            raise ValueError(f"max_overtaken = {max_overtaken}: must not be negative")
        self.token_budget = token_budget
        self.max_overtaken = max_overtaken

    def select(self, active_tokens: int, waiting: Sequence[SizedT]) -> list[SizedT]:
        """The requests of ``waiting`` (oldest first) that join a pack of ``active_tokens`` tokens now."""
        joining: list[SizedT] = []
        passed_over: list[SizedT] = []
        tokens = active_tokens
        for candidate in waiting:
            if tokens == 0 or tokens + candidate.tokens <= self.token_budget:
                if any(older.overtaken >= self.max_overtaken for older in passed_over):
                    break
                for older in passed_over:
                    older.overtaken += 1
                tokens += candidate.tokens
                joining.append(candidate)
            else:
                passed_over.append(candidate)
        return joining
