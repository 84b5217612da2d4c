"""The one error of this package: two lines, what is wrong and what to do about it."""

from __future__ import annotations

from ditpack.errors import DitpackError


class ServeError(DitpackError):
    """tritonserver cannot be started, or ended by itself. ``str()`` of it is exactly two lines."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = " ".join(problem.split())
        self.remedy = " ".join(remedy.split())
        super().__init__(f"{self.problem}\n{self.remedy}")
