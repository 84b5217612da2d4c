"""What the linter has to say: one finding is one place, what is wrong with it, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_SHOWN = 12  # names that a fix lists

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``line`` and ``column`` count from 1; 0 when the finding is about the file or directory as a whole.

    An error is what Triton or ditpack refuses, or what makes every request fail; a warning is what loads but probably
    does not do what was meant.
    """

    file: Path
    line: int
    column: int
    severity: Severity
    rule: str
    message: str
    fix: str


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``Did you mean 'x'?`` when one of ``known`` looks like ``word``, else all of them."""
    names = sorted(set(known))
    by_folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {by_folded[close[0]]!r}?"
    if not names:
        return "There is none."
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return f"There {'are' if len(names) > 1 else 'is only'} {shown}."
