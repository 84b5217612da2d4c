"""The errors a request can end with. Each names the Triton code it becomes on the wire."""

from __future__ import annotations

from typing import Any, ClassVar

_SHOWN = 60  # characters of a bad value that an error repeats: enough to recognise it, never a 10 MB echo


class DitpackError(Exception):
    """A failure with a message meant for the client. ``code`` is the name of a ``TritonError`` code."""

    code: ClassVar[str] = "INTERNAL"


class InvalidRequest(DitpackError):
    """The request cannot be served as it is; sending it again cannot help."""

    code = "INVALID_ARG"

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        super().__init__(f"{field} = {shorten(value)}: {allowed}")
        self.field = field


class Unavailable(DitpackError):
    """The server cannot take the request now (full, stopping or broken); a retry may succeed."""

    code = "UNAVAILABLE"


class Cancelled(DitpackError):
    """Nobody wants the result any more."""

    code = "CANCELLED"


class DeadlinePassed(Cancelled):
    """The request's own deadline passed."""


class GenerationFailed(DitpackError):
    """This request's own computation failed; its neighbours were not touched."""

    code = "INTERNAL"


def shorten(value: Any) -> str:
    """``repr`` of ``value``, cut to a length that fits an error message."""
    if isinstance(value, str | bytes):
        length = len(value)
        shown = repr(value[:_SHOWN])
        return (
            shown
            if length <= _SHOWN
            else f"{shown}… ({length} {'bytes' if isinstance(value, bytes) else 'characters'})"
        )
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
