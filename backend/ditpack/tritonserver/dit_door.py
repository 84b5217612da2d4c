"""``dit``: admits requests to the engine and returns; the engine's delivery thread answers them one by one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ditpack.errors import DitpackError, InvalidRequest
from ditpack.request import Request, resolve_json
from ditpack.tritonserver import dit_devices
from ditpack.tritonserver.isolation import check_deadline
from ditpack.tritonserver.logs import route_logs
from ditpack.tritonserver.metrics import EngineMetrics
from ditpack.tritonserver.outcomes import Outcomes
from ditpack.tritonserver.parameters import DitSettings, Instance
from ditpack.tritonserver.responder import Responder
from ditpack.tritonserver.tensors import Outputs, read_array, read_bytes, text

if TYPE_CHECKING:
    import torch

    from ditpack.engine.channel import EngineChannel
    from ditpack.engine.engine import Engine
    from ditpack.engine.job import Job, Result

_DRAIN_S = 20.0  # for what is in flight when the model is unloaded; tritonserver's --exit-timeout-secs must exceed it


class DitDoor:
    def __init__(
        self,
        engine: Engine,
        channel: EngineChannel | None,
        resolve: Callable[[bytes], Request],
        conditioning: Callable[[Any, Callable[[str], torch.Tensor]], Any],
        queue_timeout_s: float,
        outputs: Outputs,
        outcomes: Outcomes,
        metrics: EngineMetrics,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._resolve = resolve
        self._conditioning = conditioning
        self._queue_timeout_s = queue_timeout_s
        self._outputs = outputs
        self._outcomes = outcomes
        self._metrics = metrics

    @classmethod
    def load(cls, args: Mapping[str, str]) -> DitDoor:
        """Load the transformer of the configured checkpoint onto the instance's device and start its engine.

        Raises:
            ParameterError, CheckpointError: it cannot be served as configured.
        """
        route_logs()
        instance = Instance.from_args(args, several_devices=True)
        settings = instance.settings(DitSettings)
        dit_devices.check_kind(instance, settings)

        from ditpack.engine.channel import EngineChannel, run_directory
        from ditpack.engine.engine import Engine
        from ditpack.models.checkpoint import open_checkpoint
        from ditpack.models.families import FAMILIES
        from ditpack.models.preview import PreviewMaker
        from ditpack.sampling.knee import default_token_budget

        checkpoint = open_checkpoint(settings.checkpoint, settings.weights)
        limits = checkpoint.limits(settings.max_pixels)
        sampler = dit_devices.load(instance, settings, checkpoint)
        metrics = EngineMetrics(instance.name)
        try:
            token_budget = settings.token_budget or default_token_budget(sampler)
        except BaseException:
            sampler.close()
            raise
        engine = Engine(
            sampler, token_budget=token_budget, max_queue_size=settings.max_queue_size, on_step=metrics.step
        )
        previews = PreviewMaker(checkpoint)
        threading.Thread(target=previews.warm_up, name="ditpack-previews", daemon=True).start()
        outputs = Outputs(instance.config)
        return cls(
            engine,
            EngineChannel(engine, run_directory(), instance.name, previews),
            partial(resolve_json, limits=limits, resolver=FAMILIES[checkpoint.family].resolver),
            sampler.conditioning,
            settings.queue_timeout_s,
            outputs,
            Outcomes(instance.model),
            metrics,
        )

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Hand the requests to the engine, one after the other; what is wrong with one is that one's answer.

        Never blocks: the queue is the engine's. It knows what each request costs, looks at it at every step and says
        how many wait; Triton's own would hand bursts over in pieces, 500 ms apart (docs/tuning.md).
        """
        arrived_ns = time.monotonic_ns()
        for request in requests:
            responder = Responder(request, self._outcomes)
            try:
                job = self._job(request, responder, arrived_ns)
                self._engine.submit(job)
            except Exception as error:  # whatever it was, it is this request's answer
                responder.fail(error)

    def finalize(self) -> None:
        """Finish what is in flight for a bounded time, fail the rest, end the engine's threads and its workers."""
        self._engine.close(_DRAIN_S)
        if self._channel is not None:
            self._channel.close()

    def is_ready(self) -> bool:
        """Whether new requests are taken; Triton asks from 26.03 on."""
        return self._engine.healthy

    def _job(self, request: pb_utils.InferenceRequest, responder: Responder, arrived_ns: int) -> Job:
        from ditpack.engine.job import Job

        resolved = self._resolve(read_bytes(request, "REQUEST"))
        check_deadline(resolved, "denoising")
        requested = request.requested_output_names()
        encode_ms = max(0, arrived_ns - resolved.accepted_ns) / 1e6

        def deliver(result: Result | DitpackError) -> None:
            try:
                if isinstance(result, DitpackError):
                    raise result
                responder.send(self._response(resolved, result, encode_ms, requested))
                times = (encode_ms, result.info["queue_ms"], result.info["denoise_ms"])
                self._metrics.denoised(*(milliseconds / 1000 for milliseconds in times))
            except Exception as error:  # whatever it was, it is this request's answer
                responder.fail(error)
            finally:
                engine = self._engine
                self._metrics.load(engine.active_requests, engine.active_rows, engine.waiting_requests)

        return Job(
            request=resolved,
            request_id=responder.request_id,
            conditioning=self._conditioning(resolved, partial(_tensor, request)),
            deliver=deliver,
            # Asked by the engine's thread alone: tritonserver 2.51 crashed now and then when two threads asked at once.
            is_cancelled=responder.is_cancelled,
            timeout_s=min(self._queue_timeout_s, request.timeout() / 1e6 or self._queue_timeout_s),
            arrived=arrived_ns / 1e9,
        )

    def _response(
        self, request: Request, result: Result, encode_ms: float, requested: Sequence[str]
    ) -> pb_utils.InferenceResponse:
        resolved = request.as_dict()
        del resolved["accepted_ns"]
        info = {"request": resolved, "encode_ms": encode_ms, **result.info}
        info = {name: round(value, 3) if isinstance(value, float) else value for name, value in info.items()}
        values = {"LATENTS": result.latents.numpy(), "INFO": text(json.dumps(info))}
        return self._outputs.response(values, requested)


def _tensor(request: pb_utils.InferenceRequest, name: str) -> torch.Tensor:
    """Input ``name``; the engine knows what shapes it may have.

    Raises:
        InvalidRequest: it is missing, or not finite.
    """
    import torch

    array = read_array(request, name)
    if not np.isfinite(array).all():
        raise InvalidRequest(name, array[~np.isfinite(array)][0].item(), "must be finite")
    return torch.from_numpy(array)
