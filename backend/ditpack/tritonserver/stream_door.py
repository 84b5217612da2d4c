"""``qwen_image_stream``: an ensemble's images with the story of their making, over the same steps."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from ditpack.engine import channel
from ditpack.errors import InvalidRequest
from ditpack.fields import integer
from ditpack.request import SHORTEST_ID, STREAM_FIELDS
from ditpack.tritonserver.errors import error_of, triton_error
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.parameters import Instance, StreamSettings
from ditpack.tritonserver.responder import Responder
from ditpack.tritonserver.tensors import read_scalar, text

_LOOK_S = 0.25  # how often a stream is asked whether its client is still there
_STREAMS = 256  # at a time; the next ones wait for their turn
_ARRIVAL_S = 3600.0  # the longest that a request may take to reach the engine: encoding, Triton's queue


class StreamDoor:
    def __init__(self, ensemble: str, outcomes: Outcomes) -> None:
        self._ensemble = ensemble
        self._outcomes = outcomes
        # Triton's async_exec keeps a thread of the loop's own pool for each request in flight; as it is, that pool has
        # a few threads more than the machine has cores. Cancels must not wait behind it.
        self._calls = ThreadPoolExecutor(_STREAMS, "ditpack-stream")
        self._cancels = ThreadPoolExecutor(4, "ditpack-cancel")

    @classmethod
    def load(cls, args: Mapping[str, str]) -> StreamDoor:
        """Raises ParameterError: it is configured wrongly."""
        route_logs()
        instance = Instance.from_args(args)
        return cls(instance.settings(StreamSettings).ensemble, Outcomes(instance.model))

    async def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        asyncio.get_running_loop().set_default_executor(self._calls)
        await asyncio.gather(*(self._serve(request) for request in requests))

    async def _serve(self, request: pb_utils.InferenceRequest) -> None:
        """Answer with events until the image or the error, which is the last."""
        responder = Responder(request, self._outcomes)
        try:
            responder.send(await self._stream(request, responder))
        except Exception as error:  # whatever it was, it is this request's answer
            responder.fail(error)

    async def _stream(self, request: pb_utils.InferenceRequest, responder: Responder) -> pb_utils.InferenceResponse:
        if read_scalar(request, "OUTPUT_FORMAT") == b"raw":
            raise InvalidRequest("OUTPUT_FORMAT", "raw", "must be png, jpeg or webp in a stream")
        sent = {"PREVIEW_EVERY": read_scalar(request, "PREVIEW_EVERY")}
        every = integer(sent, "PREVIEW_EVERY", STREAM_FIELDS["PREVIEW_EVERY"]) or 0
        as_text = read_scalar(request, "RESPONSE_FORMAT") == b"b64_json"
        request_id = request.request_id()
        if len(request_id) < SHORTEST_ID:  # others could guess it
            request_id = secrets.token_hex(16)
        responder.tell(_event({"event": "queued", "id": request_id, "position": None}))
        image = asyncio.create_task(self._image(request, request_id))
        watchers = [
            asyncio.create_task(self._tell(path, request_id, every, as_text, responder))
            for path in channel.sockets(channel.run_directory())
        ]
        try:
            while not image.done():
                await asyncio.wait([image], timeout=_LOOK_S)
                if not image.done() and responder.is_cancelled():
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._cancels, channel.cancel, channel.run_directory(), request_id)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        return image.result()

    async def _image(self, request: pb_utils.InferenceRequest, request_id: str) -> pb_utils.InferenceResponse:
        """Have the ensemble make it; the image event, or its error."""
        inputs = [
            pb_utils.Tensor(tensor.name(), tensor.as_numpy())
            for tensor in request.inputs()
            if tensor.name() != "PREVIEW_EVERY"
        ]
        outputs = ["IMAGE", "SEED_USED", "INFO"]
        answer = await pb_utils.InferenceRequest(
            model_name=self._ensemble,
            request_id=request_id,
            requested_output_names=outputs,
            inputs=inputs,
            timeout=request.timeout(),
        ).async_exec()
        if answer.has_error():
            error = error_of(answer.error())  # logged and counted where it arose
            return pb_utils.InferenceResponse(error=triton_error(error))
        return _event({"event": "image", "id": request_id}, *answer.output_tensors())

    async def _tell(self, path: Path, request_id: str, every: int, as_text: bool, responder: Responder) -> None:
        """Pass on what one engine says of the request."""
        async for event, picture in _events(channel.watch(path, request_id, _ARRIVAL_S, every)):
            tensors = []
            if picture is not None:
                data = picture.encode() if as_text else base64.b64decode(picture)
                tensors.append(pb_utils.Tensor("IMAGE", text(data)))
            responder.tell(_event({"event": event.pop("event"), "id": request_id, **event}, *tensors))


async def _events(lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[tuple[dict[str, Any], str | None]]:
    """An engine's progress lines as events, and the previews' pictures."""
    step = 0
    async for line in lines:
        if line["step"] > step:
            step, pace = line["step"], line["seconds"] / line["step"]
            yield (
                {
                    "event": "step",
                    "step": step,
                    "steps": line["steps"],
                    "seconds_per_step": round(pace, 4),
                    "remaining_s": round(pace * (line["steps"] - step), 2),
                },
                None,
            )
        elif line["step"] == 0 and line["position"]:
            yield {"event": "queued", "position": line["position"]}, None
        if "preview" in line:
            yield {"event": "preview", "step": line["preview_step"], "steps": line["steps"]}, line["preview"]


def _event(event: dict[str, Any], *tensors: pb_utils.Tensor) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("EVENT", text(json.dumps(event))), *tensors])
