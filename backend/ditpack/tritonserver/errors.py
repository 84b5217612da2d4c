"""Our errors on Triton's wire: one table, and nothing that tells a client about our files."""

from __future__ import annotations

import re

import triton_python_backend_utils as pb_utils

from ditpack.errors import Cancelled, DeadlinePassed, DitpackError, GenerationFailed, Unavailable

# DitpackError.code, also the name of Triton's code → the outcome's name in `ditpack_requests_total` and in the log.
# Triton's own constants are looked up late: while model.py is imported, pb_utils does not have them yet.
_OUTCOMES = {"INVALID_ARG": "invalid", "CANCELLED": "cancelled", "UNAVAILABLE": "unavailable", "INTERNAL": "failed"}
OUTCOMES = ("ok", *_OUTCOMES.values(), "deadline")


def triton_error(error: Exception) -> pb_utils.TritonError:
    """What the client gets: our own errors with their message, anything else as INTERNAL with its type alone."""
    if isinstance(error, DitpackError):
        return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code))
    message = f"internal error ({type(error).__name__}); the server's log has the details under this request's id"
    return pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL)


def outcome(error: Exception) -> str:
    """``invalid``, ``cancelled``, ``deadline``, ``unavailable`` or ``failed``."""
    if isinstance(error, DeadlinePassed):  # on the wire it is CANCELLED too
        return "deadline"
    return _OUTCOMES[error.code] if isinstance(error, DitpackError) else "failed"


class _Passed(DitpackError):
    """An error of another model, on its way through this one."""

    code = "INVALID_ARG"


def error_of(answer: pb_utils.TritonError) -> DitpackError:
    """The error that another of our models answered with.

    Before 25.04 Triton turns every code into INTERNAL on the way through BLS; then the words tell which it was.
    """
    message = _PREFIX.sub("", answer.message())
    code = answer.code()
    for name, kind in (("CANCELLED", Cancelled), ("UNAVAILABLE", Unavailable), ("INVALID_ARG", _Passed)):
        if code == getattr(pb_utils.TritonError, name) or _WORDS[name].search(message):
            return kind(message)
    return GenerationFailed(message)


_PREFIX = re.compile(r"^(in ensemble '[^']*', ?)+")
_WORDS = {
    "CANCELLED": re.compile(r"^cancelled by |^DEADLINE_MS = \d+: the deadline passed"),
    "UNAVAILABLE": re.compile(
        r"^full: |^timeout: |shutting down|engine stopped|workers were lost"  # ours
        r"|maximum queue size|timeout expired|is not ready"  # Triton's
    ),
    "INVALID_ARG": re.compile(r"^[A-Z_]+ = "),
}
