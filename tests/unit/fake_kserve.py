"""A server that speaks enough of KServe v2 over HTTP and gRPC to answer the client, and paints flat colours.

It keeps what it was asked, counts how many requests it holds at once, and misbehaves on demand: the prompt
"refuse: MESSAGE" is an invalid argument, "busy" is unavailable, "slow" takes ``SLOW_S``.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import grpc
import numpy as np
from PIL import Image
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

SLOW_S = 0.6
MODELS = ("qwen_image", "qwen_image_edit")
_STATUS = {"INVALID_ARG": (400, grpc.StatusCode.INVALID_ARGUMENT), "UNAVAILABLE": (503, grpc.StatusCode.UNAVAILABLE)}


class Refusal(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.http, self.grpc = _STATUS[code]


class Painter:
    """The part that both front ends share: named arrays in, named arrays out."""

    def __init__(self) -> None:
        self.requests: list[dict[str, tuple[str, tuple[int, ...], Any]]] = []
        self.models: list[str] = []
        self.outputs: list[list[str]] = []
        self.at_once = self._active = 0
        self._lock = threading.Lock()

    def answer(
        self, model: str, inputs: dict[str, tuple[str, np.ndarray]], outputs: list[str]
    ) -> dict[str, tuple[str, np.ndarray]]:
        given = {name: array.tolist() if name == "IMAGES" else array.item() for name, (_, array) in inputs.items()}
        with self._lock:
            self.models.append(model)
            self.requests.append({name: (kind, array.shape, given[name]) for name, (kind, array) in inputs.items()})
            self.outputs.append(outputs)
            self._active += 1
            self.at_once = max(self.at_once, self._active)
        try:
            return self._paint(given)
        finally:
            with self._lock:
                self._active -= 1

    def _paint(self, given: dict[str, Any]) -> dict[str, tuple[str, np.ndarray]]:
        prompt = given["PROMPT"].decode()
        if prompt.startswith("refuse: "):
            raise Refusal("INVALID_ARG", f"in ensemble 'qwen_image', {prompt.removeprefix('refuse: ')}")
        if prompt == "busy":
            raise Refusal("UNAVAILABLE", "the waiting room is full")
        if prompt == "slow":
            time.sleep(SLOW_S)
        width, height, seed = given.get("WIDTH", 64), given.get("HEIGHT", 48), given.get("SEED", 4242)
        output_format = given.get("OUTPUT_FORMAT", b"png").decode()
        pixels = np.full((height, width, 3), (seed % 256, 20, 30), dtype=np.uint8)
        file = io.BytesIO()
        if output_format != "raw":
            Image.fromarray(pixels).save(file, format=output_format)
        info = {
            "request": {
                "prompt": prompt,
                "negative_prompt": given.get("NEGATIVE_PROMPT", b" ").decode(),
                "num_inference_steps": given.get("NUM_INFERENCE_STEPS", 50),
                "true_cfg_scale": given.get("TRUE_CFG_SCALE", 4.0),
            },
            "queue_ms": 1.5,
            "encode_ms": 2.5,
            "denoise_ms": 1234.5,
            "decode_ms": 3.5,
            "steps": given.get("NUM_INFERENCE_STEPS", 50),
            "pack": {"requests_max": 2, "requests_mean": 1.5, "shared_steps": 7},
        }
        return {
            "IMAGE": ("BYTES", np.array([file.getvalue()], dtype=np.object_)),
            "PIXELS": ("UINT8", pixels),
            "SEED_USED": ("INT64", np.array([seed], dtype=np.int64)),
            "INFO": ("BYTES", np.array([json.dumps(info).encode()], dtype=np.object_)),
        }


def _array(kind: str, shape: list[int], raw: bytes) -> np.ndarray:
    flat = deserialize_bytes_tensor(raw) if kind == "BYTES" else np.frombuffer(raw, dtype=triton_to_np_dtype(kind))
    return flat.reshape(shape)


def _raw(kind: str, array: np.ndarray) -> bytes:
    return serialize_byte_tensor(array).item() if kind == "BYTES" else array.tobytes()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    painter: ClassVar[Painter]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        model = self.path.removeprefix("/v2/models/").removesuffix("/infer")
        if model not in MODELS:
            self._send(404, json.dumps({"error": f"Request for unknown model: {self.path} is not found"}).encode())
            return
        header = int(self.headers["Inference-Header-Content-Length"])
        request, data, inputs = json.loads(body[:header]), memoryview(body)[header:], {}
        for tensor in request["inputs"]:
            size = tensor["parameters"]["binary_data_size"]
            inputs[tensor["name"]] = (
                tensor["datatype"],
                _array(tensor["datatype"], tensor["shape"], bytes(data[:size])),
            )
            data = data[size:]
        wanted = [tensor["name"] for tensor in request["outputs"]]
        try:
            answer = self.painter.answer(model, inputs, wanted)
        except Refusal as refusal:
            self._send(refusal.http, json.dumps({"error": str(refusal)}).encode())
            return
        parts = {name: _raw(*answer[name]) for name in wanted}
        outputs = [
            {
                "name": name,
                "datatype": answer[name][0],
                "shape": list(answer[name][1].shape),
                "parameters": {"binary_data_size": len(parts[name])},
            }
            for name in wanted
        ]
        head = json.dumps({"model_name": "qwen_image", "outputs": outputs}).encode()
        self._send(200, head + b"".join(parts.values()), {"Inference-Header-Content-Length": str(len(head))})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # with the usual 5, connections made at once wait a second for their SYN to be repeated

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has hung up is part of the tests."""


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, painter: Painter) -> None:
        self._painter = painter

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 (gRPC's name)
        inputs = {
            tensor.name: (tensor.datatype, _array(tensor.datatype, list(tensor.shape), raw))
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        wanted = [tensor.name for tensor in request.outputs]
        try:
            answer = self._painter.answer(request.model_name, inputs, wanted)
        except Refusal as refusal:
            context.abort(refusal.grpc, str(refusal))
        response = service_pb2.ModelInferResponse(model_name="qwen_image")
        for name in wanted:
            kind, array = answer[name]
            response.outputs.add(name=name, datatype=kind, shape=array.shape)
            response.raw_output_contents.append(_raw(kind, array))
        return response


@contextmanager
def serve_http(painter: Painter) -> Iterator[str]:
    """Yields the address, such as "127.0.0.1:40123"."""
    handler = type("Handler", (_Handler,), {"painter": painter})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


@contextmanager
def serve_grpc(painter: Painter) -> Iterator[str]:
    """Yields the address, such as "grpc://127.0.0.1:40123"."""
    server = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(painter), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait(10)
