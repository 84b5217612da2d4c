"""Exactly one answer for a request that is answered after ``execute`` has returned.

Triton lets a client wait for ever when its sender is never used, used without the final flag, or used wrongly once.
"""

from __future__ import annotations

import threading

import triton_python_backend_utils as pb_utils

from ditpack.errors import GenerationFailed
from ditpack.tritonserver.outcomes import Outcomes


class Responder:
    """The only user of a request's sender. The first answer counts, later ones are ignored; dropping it unanswered
    answers with an error. ``send`` and ``fail`` block until Triton has taken the answer: not for the step thread."""

    def __init__(self, request: pb_utils.InferenceRequest, outcomes: Outcomes) -> None:
        self._answered = threading.Lock()  # taken by the first answer, never released
        self._outcomes = outcomes
        self.request_id: str = request.request_id()
        self._sender = request.get_response_sender()

    def tell(self, event: pb_utils.InferenceResponse) -> None:
        """Send ``event`` ahead of the answer; for decoupled models."""
        self._sender.send(event)

    def send(self, response: pb_utils.InferenceResponse) -> bool:
        """Answer with ``response``; False when the request was answered before."""
        if not self._answered.acquire(blocking=False):
            return False
        self._deliver(response)
        return True

    def fail(self, error: Exception) -> bool:
        """Answer with ``error``, logged and counted; False when the request was answered before."""
        if not self._answered.acquire(blocking=False):
            return False
        self._deliver(self._outcomes.failure(self.request_id, error))
        return True

    def is_cancelled(self) -> bool:
        """Whether the client gave up. Asks Triton (tens of microseconds): once a step, not once a token."""
        return bool(self._sender.is_cancelled())

    def _deliver(self, response: pb_utils.InferenceResponse) -> None:
        try:
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:  # the client must still get an answer
            self._outcomes.warn(self.request_id, "an answer could not be sent; trying an error instead", error)
            failure = response if response.has_error() else self._outcomes.failure(self.request_id, error)
            try:
                self._sender.send(failure, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception as again:  # nothing is left to try; the log has both
                self._outcomes.warn(self.request_id, "Triton took no answer for this request", again)

    def __del__(self) -> None:
        if hasattr(self, "_sender"):  # else the constructor failed and execute() answers
            self.fail(GenerationFailed("the request was dropped without an answer"))
