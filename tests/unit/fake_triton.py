"""Loads the models of model_repository/ as tritonserver would and runs requests through them.

Stricter than Triton: an answer whose tensors are not what config.pbtxt declares, a second answer and a missing answer
all fail the test. Inputs are overwritten after ``execute``, as Triton takes their memory back.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_pb_utils
import numpy as np
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

REPOSITORY = Path(__file__).parents[2] / "model_repository"
MODELS = ("prepare", "text_encoder", "dit", "vae_decoder")  # of qwen_image
EDIT_MODELS = ("prepare_edit", "text_encoder", "vae_encoder", "dit", "vae_decoder")  # of qwen_image_edit
MAMMOTH_MODELS = ("mammoth_prepare", "mammoth_dit", "mammoth_vae_decoder")  # of mammoth_moda2
WAIT_S = 60.0


def read_config(model: str) -> Any:
    """``model``'s config.pbtxt as a protobuf message; raises with line and column when it does not parse."""
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def triton_args(
    model: str, parameters: dict[str, str] | None = None, kind: str = "CPU", device: int = 0
) -> dict[str, str]:
    """What Triton passes to ``initialize``: config.pbtxt with ``parameters`` laid over its own."""
    config = json_format.MessageToDict(read_config(model), preserving_proto_field_name=True)
    config.setdefault("parameters", {}).update({k: {"string_value": v} for k, v in (parameters or {}).items()})
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": kind,
        "model_instance_name": f"{model}_0_0",
        "model_instance_device_id": str(device),
        "model_repository": str(REPOSITORY / model),
        "model_version": "1",
        "model_name": model,
    }


def import_model(model: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("1.model", REPOSITORY / model / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Answer:
    """What the client gets: outputs without batch dimension, or the error's code name and message."""

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    code: str | None = None
    message: str = ""


class FakeModel:
    """A loaded model of the repository, or ``instance`` (anything with an ``execute``) under the config of one."""

    def __init__(self, name: str, parameters: dict[str, str] | None = None, instance: Any = None) -> None:
        self.name = name
        self.config = read_config(name)
        self._batched = self.config.max_batch_size > 0
        if instance is None:
            instance = import_model(name).TritonPythonModel()
            instance.initialize(triton_args(name, parameters))
        self.instance = instance

    def request(
        self, inputs: dict[str, np.ndarray], outputs: Iterable[str] | None = None, request_id: str = ""
    ) -> fake_pb_utils.InferenceRequest:
        """A request of arrays without batch dimension, checked against the config as Triton's core does."""
        declared = {entry.name: entry for entry in self.config.input}
        tensors = []
        for name, array in inputs.items():
            entry = declared[name]
            data_type = model_config_pb2.DataType.Name(entry.data_type)
            assert array.dtype == np.dtype(fake_pb_utils.triton_string_to_numpy(data_type)), name
            assert array.ndim == len(entry.dims), name
            tensors.append(fake_pb_utils.Tensor(name, (array[np.newaxis] if self._batched else array).copy()))
        missing = [name for name, entry in declared.items() if not entry.optional and name not in inputs]
        assert not missing, missing
        requested = list(outputs) if outputs is not None else [entry.name for entry in self.config.output]
        decoupled = self.config.model_transaction_policy.decoupled
        return fake_pb_utils.InferenceRequest(tensors, requested, request_id, decoupled=decoupled)

    def execute(self, requests: list[fake_pb_utils.InferenceRequest]) -> None:
        """Hand them over, as many in a call as Triton would; answers may come later."""
        most = max(1, self.config.max_batch_size)
        for start in range(0, len(requests), most):
            self._execute(requests[start : start + most])

    def _execute(self, requests: list[fake_pb_utils.InferenceRequest]) -> None:
        returned = self.instance.execute(requests)
        if inspect.isawaitable(returned):
            returned = asyncio.run(returned)
        if self.config.model_transaction_policy.decoupled:
            assert returned is None
        if returned is not None:
            assert len(returned) == len(requests)
            for request, response in zip(requests, returned, strict=True):
                if response is not None:
                    request.answer(response)
        for request in requests:
            for tensor in request.inputs():
                tensor.as_numpy()[...] = b"\xff" if tensor.as_numpy().dtype == np.object_ else 111

    def infer(self, *requests: fake_pb_utils.InferenceRequest) -> list[Answer]:
        """Run them to the end and return each request's only answer."""
        self.execute(list(requests))
        return [self.answer(request) for request in requests]

    def answer(self, request: fake_pb_utils.InferenceRequest) -> Answer:
        deadline = time.monotonic() + WAIT_S
        while not request.answered.wait(0.5):
            gc.collect()
            assert time.monotonic() < deadline, f"{self.name} never answered request {request.request_id()!r}"
        assert len(request.answers) == 1, f"{self.name} answered {len(request.answers)} times"
        return self._read(request.answers[0], request)

    def stream(self, request: fake_pb_utils.InferenceRequest) -> list[Answer]:
        """All answers of a decoupled model to one request; after the final one none may come."""
        self.execute([request])
        assert request.answered.wait(WAIT_S), f"{self.name} never ended request {request.request_id()!r}"
        return [self._read(response, request) for response in request.answers]

    def _read(self, response: fake_pb_utils.InferenceResponse, request: fake_pb_utils.InferenceRequest) -> Answer:
        if response.has_error():
            error = response.error()
            assert not response.output_tensors()
            return Answer(code=fake_pb_utils.TritonError.NAMES[error.code()], message=error.message())
        return Answer({t.name(): self._checked(t, request) for t in response.output_tensors()})

    def _checked(self, tensor: fake_pb_utils.Tensor, request: fake_pb_utils.InferenceRequest) -> np.ndarray:
        entry = {entry.name: entry for entry in self.config.output}[tensor.name()]
        array = tensor.as_numpy()
        assert tensor.name() in request.requested_output_names(), f"{tensor.name()} was not asked for"
        data_type = model_config_pb2.DataType.Name(entry.data_type)
        assert array.dtype == np.dtype(fake_pb_utils.triton_string_to_numpy(data_type)), tensor.name()
        if self._batched:
            assert array.shape[:1] == (1,), tensor.name()
            array = array[0]
        assert array.ndim == len(entry.dims), tensor.name()
        assert all(dim in (-1, size) for dim, size in zip(entry.dims, array.shape, strict=True)), tensor.name()
        return array


class FakeEnsemble:
    """Runs the steps of an ensemble's config in order, by its maps, one batch of all live requests a step."""

    def __init__(self, name: str, models: dict[str, FakeModel]) -> None:
        self.config = read_config(name)
        self.models = models

    def infer(self, *requests: dict[str, np.ndarray]) -> list[Answer]:
        scopes = [dict(request) for request in requests]
        answers: list[Answer | None] = [None] * len(requests)
        for step in self.config.ensemble_scheduling.step:
            model = self.models[step.model_name]
            live = [index for index, answer in enumerate(answers) if answer is None]
            if not live:
                break
            batch = []
            for index in live:
                mapped = {key: scopes[index][value] for key, value in step.input_map.items() if value in scopes[index]}
                batch.append(model.request(mapped, step.output_map.keys(), f"request {index}"))
            for index, answer in zip(live, model.infer(*batch), strict=True):
                if answer.code is not None:
                    answers[index] = answer
                else:
                    scopes[index].update({step.output_map[key]: array for key, array in answer.outputs.items()})
        names = [entry.name for entry in self.config.output]
        outputs = [Answer({name: scope[name] for name in names if name in scope}) for scope in scopes]
        return [answer or output for answer, output in zip(answers, outputs, strict=True)]
