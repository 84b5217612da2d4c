"""``control``: stop a request by its id, over any protocol; ask how the engines are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import triton_python_backend_utils as pb_utils

from ditpack.engine import channel
from ditpack.errors import InvalidRequest
from ditpack.fields import text as read_text
from ditpack.request import CONTROL_FIELDS, SHORTEST_ID
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.parameters import ControlSettings, Instance
from ditpack.tritonserver.tensors import read_scalar, text


class ControlDoor:
    @classmethod
    def load(cls, args: Mapping[str, str]) -> ControlDoor:
        """Raises ParameterError: it is configured wrongly."""
        route_logs()
        Instance.from_args(args).settings(ControlSettings)
        return cls()

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [_answer(request) for request in requests]


def _answer(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    try:
        sent = {name: read_scalar(request, name) for name in CONTROL_FIELDS}
        action, request_id = (read_text(sent, name, field) or "" for name, field in CONTROL_FIELDS.items())
        answer = _do(action, request_id)
    except InvalidRequest as error:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
    return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", text(json.dumps(answer)))])


def _do(action: str, request_id: str) -> dict[str, object]:
    directory = channel.run_directory()
    if action == "status":
        return {"engines": channel.status(directory)}
    if action == "cancel":
        if len(request_id) < SHORTEST_ID:
            raise InvalidRequest("ID", request_id, f"must have at least {SHORTEST_ID} characters, or others guess it")
        return {"found": channel.cancel(directory, request_id)}
    raise InvalidRequest("ACTION", action, CONTROL_FIELDS["ACTION"].allowed)
