"""A server that speaks enough of KServe v2 over HTTP and gRPC to answer the client, and paints flat colours.

It keeps what it was asked, counts how many requests it holds at once, and misbehaves on demand: the prompt
"refuse: MESSAGE" is an invalid argument, "busy" is unavailable, "slow" takes ``SLOW_S``, "endless" ends when it is
cancelled, "cut" (streams) stops without an image. With ``Painter(streams=True)`` it has qwen_image_stream and control.
"""

from __future__ import annotations

import base64
import io
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
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
ENDLESS_S = 20.0
MODELS = ("qwen_image", "qwen_image_edit")
STREAM_MODELS = (*MODELS, "qwen_image_stream", "control")
_STATUS = {
    "INVALID_ARG": (400, grpc.StatusCode.INVALID_ARGUMENT),
    "UNAVAILABLE": (503, grpc.StatusCode.UNAVAILABLE),
    "CANCELLED": (400, grpc.StatusCode.CANCELLED),
}
Outputs = dict[str, tuple[str, np.ndarray]]


class Refusal(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.http, self.grpc = _STATUS[code]


class Painter:
    """The part that both front ends share: named arrays in, named arrays out."""

    def __init__(self, streams: bool = False) -> None:
        self.served = STREAM_MODELS if streams else MODELS
        self.elsewhere = False  # requests have not reached the engine that control asks
        self.answering = threading.Event()  # control does not answer while it is not set
        self.answering.set()
        self.refusals = 0  # how many of the next requests find the server full
        self.ids: list[str] = []
        self.cancelled: set[str] = set()
        self.ended: dict[str, str] = {}  # streams: id → "finished", "cancelled", "gone" or "refused"
        self.requests: list[dict[str, tuple[str, tuple[int, ...], Any]]] = []
        self.models: list[str] = []
        self.outputs: list[list[str]] = []
        self.at_once = self._active = 0
        self._here: list[str] = []
        self._lock = threading.Lock()

    def answer(self, model: str, inputs: Outputs, outputs: list[str], request_id: str) -> Outputs:
        if model == "control":
            return {"ANSWER": _text(json.dumps(self._control(**{name: a.item() for name, (_, a) in inputs.items()})))}
        with self._held(model, inputs, outputs, request_id) as given:
            if given["PROMPT"] == b"endless":
                self._until_cancelled(request_id)
            return self._paint(given)

    def tell(self, inputs: Outputs, request_id: str, gone: Callable[[], bool]) -> Iterator[Outputs]:
        """The responses of one stream. ``gone``: whether its client is."""

        def event(kind: str, **fields: Any) -> Outputs:
            return {"EVENT": _text(json.dumps({"event": kind, "id": request_id, **fields}))}

        self.ended[request_id] = "refused"
        try:
            yield from self._story(inputs, request_id, gone, event)
        except GeneratorExit:  # writing to the client failed
            self.ended[request_id] = "gone"
            raise

    def _story(
        self, inputs: Outputs, request_id: str, gone: Callable[[], bool], event: Callable[..., Outputs]
    ) -> Iterator[Outputs]:
        with self._held("qwen_image_stream", inputs, [], request_id) as given:
            yield event("queued", position=None)
            yield event("queued", position=2)
            yield event("heartbeat")  # of a newer server
            steps, every = given.get("NUM_INFERENCE_STEPS", 3), given.get("PREVIEW_EVERY", 0)
            endless = given["PROMPT"] == b"endless"
            picture = self._paint(given)
            for step in range(1, int(ENDLESS_S / 0.01) if endless else steps + 1):
                yield event("step", step=step, steps=steps, seconds_per_step=0.25, remaining_s=0.25 * (steps - step))
                if every and step % every == 0:
                    preview = io.BytesIO()
                    Image.new("RGB", (8, 6), "teal").save(preview, format="jpeg")
                    yield event("preview", step=step, steps=steps) | {"IMAGE": _text(preview.getvalue())}
                if endless:
                    time.sleep(0.01)
                if gone():
                    self.ended[request_id] = "gone"
                    return
                if request_id in self.cancelled:
                    self.ended[request_id] = "cancelled"
                    raise Refusal("CANCELLED", f"cancelled by its id after {step} steps")
            self.ended[request_id] = "finished"
            if given["PROMPT"] != b"cut":
                yield event("image") | {name: picture[name] for name in ("IMAGE", "SEED_USED", "INFO")}

    def _control(self, ACTION: bytes, ID: bytes = b"") -> dict[str, Any]:  # noqa: N803 (the wire's names)
        self.answering.wait(60)
        if ACTION == b"status":
            return {"engines": [{"name": "dit_0_0", "healthy": True, "active": self._active, "waiting": 0}]}
        if len(ID) < 16:
            raise Refusal("INVALID_ARG", f"ID = {ID.decode()!r}: must have at least 16 characters")
        self.cancelled.add(ID.decode())
        return {"found": ID.decode() in self._here and not self.elsewhere}

    def _until_cancelled(self, request_id: str) -> None:
        ends = time.monotonic() + ENDLESS_S
        while time.monotonic() < ends:
            time.sleep(0.01)
            if request_id in self.cancelled:
                raise Refusal("CANCELLED", "cancelled by its id after 3 steps")

    @contextmanager
    def _held(self, model: str, inputs: Outputs, outputs: list[str], request_id: str) -> Iterator[dict[str, Any]]:
        given = {name: array.tolist() if name == "IMAGES" else array.item() for name, (_, array) in inputs.items()}
        with self._lock:
            self.ids.append(request_id)
            self._here.append(request_id)
            self.models.append(model)
            self.requests.append({name: (kind, array.shape, given[name]) for name, (kind, array) in inputs.items()})
            self.outputs.append(outputs)
            self._active += 1
            self.at_once = max(self.at_once, self._active)
            self.refusals, refused = max(self.refusals - 1, 0), self.refusals > 0
        try:
            if refused:
                raise Refusal("UNAVAILABLE", "full: 4 requests have been waiting for 1 s")
            yield given
        finally:
            with self._lock:
                self._active -= 1
                self._here.remove(request_id)

    def _paint(self, given: dict[str, Any]) -> Outputs:
        prompt = given["PROMPT"].decode()
        if prompt.startswith("refuse: "):
            message = prompt.removeprefix("refuse: ")
            code = "CANCELLED" if "the deadline passed" in message else "INVALID_ARG"
            raise Refusal(code, f"in ensemble 'qwen_image', {message}")
        if prompt == "busy":
            raise Refusal("UNAVAILABLE", "full: the waiting room")
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
            "IMAGE": _text(file.getvalue()),
            "PIXELS": ("UINT8", pixels),
            "SEED_USED": ("INT64", np.array([seed], dtype=np.int64)),
            "INFO": _text(json.dumps(info)),
        }


def _unknown(model: str) -> str:
    return f"Request for unknown model: '{model}' is not found"


def _text(value: str | bytes) -> tuple[str, np.ndarray]:
    return "BYTES", np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)


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
        model, _, verb = self.path.removeprefix("/v2/models/").partition("/")
        if model not in self.painter.served:
            self._send(404, json.dumps({"error": _unknown(model)}).encode())
            return
        if verb == "generate_stream":
            self._stream(json.loads(body))
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
            answer = self.painter.answer(model, inputs, wanted, request.get("id", ""))
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

    def do_GET(self) -> None:
        model = self.path.removeprefix("/v2/models/").removesuffix("/ready")
        self._send(200 if model in self.painter.served else 400, b"")

    def _stream(self, request: dict[str, Any]) -> None:
        """As Triton does it: the status is that of the first response, and 400 for every error."""
        request_id, kind = request.pop("id"), {str: "BYTES", int: "INT32", float: "FP32"}
        assert request.pop("RESPONSE_FORMAT") == "b64_json"
        inputs = {
            name: (kind[type(value)], np.array([value.encode() if isinstance(value, str) else value]))
            for name, value in request.items()
        }
        begun = False

        def gone() -> bool:
            readable, _, _ = select.select([self.connection], [], [], 0)
            try:
                return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
            except ConnectionResetError:
                return True

        def send(fields: dict[str, Any], status: int = 200) -> None:
            nonlocal begun
            if not begun:
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            begun, data = True, b"data: " + json.dumps(fields).encode() + b"\n\n"
            for part in (data[:9], data[9:]):  # events do not end where chunks do
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()

        try:
            for outputs in self.painter.tell(inputs, request_id, gone):
                plain = {name: array.item() for name, (_, array) in outputs.items()}
                if "IMAGE" in plain:
                    plain["IMAGE"] = base64.b64encode(plain["IMAGE"])
                send({name: value.decode() if isinstance(value, bytes) else value for name, value in plain.items()})
        except Refusal as refusal:
            send({"error": str(refusal)}, 400)
        self.wfile.write(b"0\r\n\r\n")

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
        if request.model_name not in self._painter.served:
            context.abort(grpc.StatusCode.NOT_FOUND, _unknown(request.model_name))
        inputs = self._inputs(request)
        wanted = [tensor.name for tensor in request.outputs]
        try:
            answer = self._painter.answer(request.model_name, inputs, wanted, request.id)
        except Refusal as refusal:
            context.abort(refusal.grpc, str(refusal))
        return self._response({name: answer[name] for name in wanted})

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name in self._painter.served)

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """As Triton does it: an unknown model is told in words, other errors end a stream that asked for codes."""
        assert dict(context.invocation_metadata())["triton_grpc_error"] == "true"
        request = next(requests)
        if request.model_name not in self._painter.served:
            yield service_pb2.ModelStreamInferResponse(error_message=_unknown(request.model_name))
            return
        inputs = self._inputs(request)
        assert "RESPONSE_FORMAT" not in inputs
        try:
            for outputs in self._painter.tell(inputs, request.id, lambda: not context.is_active()):
                yield service_pb2.ModelStreamInferResponse(infer_response=self._response(outputs))
        except Refusal as refusal:
            context.abort(refusal.grpc, str(refusal))

    def _inputs(self, request: Any) -> Outputs:
        return {
            tensor.name: (tensor.datatype, _array(tensor.datatype, list(tensor.shape), raw))
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }

    def _response(self, outputs: Outputs) -> Any:
        response = service_pb2.ModelInferResponse(model_name="qwen_image")
        for name, (kind, array) in outputs.items():
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
