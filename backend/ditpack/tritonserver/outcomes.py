"""How each request ended: one structured log line and one count, at the model where it ended.

No line has prompt text, unless the environment variable DITPACK_LOG_PROMPTS is 1 where the server starts.
"""

from __future__ import annotations

import json
import os
import traceback
from typing import Any

import triton_python_backend_utils as pb_utils

from ditpack.errors import DitpackError, InvalidRequest
from ditpack.tritonserver.errors import outcome, triton_error
from ditpack.tritonserver.metrics import RequestMetrics

PROMPTS_VARIABLE = "DITPACK_LOG_PROMPTS"


class Outcomes:
    """The endings of one model's requests."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._metrics = RequestMetrics()
        self._log_prompts = os.environ.get(PROMPTS_VARIABLE) == "1"

    def accepted(self, request_id: str, prompt: str, negative_prompt: str | None) -> None:
        """Log the prompts of a request that was just accepted, if that is switched on."""
        if self._log_prompts:
            prompts = {"prompt": prompt, "negative_prompt": negative_prompt}
            pb_utils.Logger.log_info(json.dumps({"event": "prompt", "model": self._model, "id": request_id, **prompts}))

    def failure(self, request_id: str, error: Exception) -> pb_utils.InferenceResponse:
        """Record that ``error`` ended a request, and return the response that says so."""
        name = outcome(error)
        answer = triton_error(error)
        facts: dict[str, Any] = {}
        if isinstance(error, InvalidRequest):
            facts["field"] = error.field
            if self._log_prompts:  # the message repeats the value, which may be a prompt
                facts["message"] = str(error)
        else:
            facts["message"] = f"{type(error).__name__}: {error}"
            if not isinstance(error, DitpackError) or error.__cause__ is not None:
                facts["traceback"] = "".join(traceback.format_exception(error))
        self._record(request_id, name, facts)
        return pb_utils.InferenceResponse(output_tensors=[], error=answer)

    def success(self, request_id: str, **facts: Any) -> None:
        """Record that a request ended with its image."""
        self._record(request_id, "ok", facts)

    def warn(self, request_id: str | None, message: str, error: Exception) -> None:
        """Log something odd that did not by itself end a request."""
        facts = {"message": message, "traceback": "".join(traceback.format_exception(error))}
        pb_utils.Logger.log_warn(json.dumps({"event": "warning", "model": self._model, "id": request_id, **facts}))

    def _record(self, request_id: str, name: str, facts: dict[str, Any]) -> None:
        self._metrics.count(name)
        line = json.dumps({"event": "request", "model": self._model, "id": request_id, "outcome": name, **facts})
        (pb_utils.Logger.log_error if name == "failed" else pb_utils.Logger.log_info)(line)
