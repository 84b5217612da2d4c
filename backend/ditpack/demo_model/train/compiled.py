"""``torch.compile`` where it works, and the plain function where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
_RECOMPILES = 64  # shapes come in a dozen sizes, with and without pictures


def compiled(function: Callable[_P, _R], say: Callable[[str], None]) -> Callable[_P, _R]:
    """``function`` compiled for changing shapes. If its first call fails, ``say`` why, and go on without."""
    torch._dynamo.config.recompile_limit = _RECOMPILES  # type: ignore[attr-defined]
    chosen: list[Callable[_P, _R]] = []

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if chosen:
            return chosen[0](*args, **kwargs)
        attempt = torch.compile(function, dynamic=True)
        try:
            result = attempt(*args, **kwargs)
        except Exception as error:  # a compiler can fail in any way, and none of them may end the training
            say(f"not compiled: {type(error).__name__}: {str(error).splitlines()[:1]}")
            chosen.append(function)
            return function(*args, **kwargs)
        chosen.append(attempt)
        return result

    return call
