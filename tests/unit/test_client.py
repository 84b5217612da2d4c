"""The client against a fake server, over HTTP and gRPC, blocking and asyncio: one behaviour, four transports."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import fake_kserve
import numpy as np
import pytest
from fake_kserve import SLOW_S, Painter, serve_http
from tritonclient.utils import InferenceServerException

from ditpack_client import AsyncClient, Client, GenerationError, ImageRequest, ImageResult
from ditpack_client.address import Address, parse_address
from ditpack_client.errors import plain_errors

ALL_SETTINGS = {
    "negative_prompt": "blur",
    "width": 96,
    "height": 64,
    "num_inference_steps": 20,
    "true_cfg_scale": 2.5,
    "seed": 2**63 - 1,
    "output_format": "png",
    "deadline_ms": 9000,
    "priority": 1,
}


@pytest.fixture
def painter() -> Painter:
    return Painter()


def blocking(url: str, prompt: str, **settings: object) -> ImageResult:
    with Client(url) as client:
        return client.generate(prompt, **{"timeout": 20.0, **settings})


def awaited(url: str, prompt: str, **settings: object) -> ImageResult:
    async def run() -> ImageResult:
        async with AsyncClient(url) as client:
            return await client.generate(prompt, **{"timeout": 20.0, **settings})

    return asyncio.run(run())


Generate = Callable[..., ImageResult]
both = pytest.mark.parametrize("generate", [blocking, awaited])


@contextmanager
def listener(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that does ``behave`` with its first connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(10)
                behave(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


@both
def test_every_setting_arrives_with_its_type_and_the_shape_one(url: str, painter: Painter, generate: Generate) -> None:
    generate(url, "a red kité", **ALL_SETTINGS)
    assert painter.requests == [
        {
            "PROMPT": ("BYTES", (1,), "a red kité".encode()),
            "NEGATIVE_PROMPT": ("BYTES", (1,), b"blur"),
            "WIDTH": ("INT32", (1,), 96),
            "HEIGHT": ("INT32", (1,), 64),
            "NUM_INFERENCE_STEPS": ("INT32", (1,), 20),
            "TRUE_CFG_SCALE": ("FP32", (1,), 2.5),
            "SEED": ("INT64", (1,), 2**63 - 1),
            "OUTPUT_FORMAT": ("BYTES", (1,), b"png"),
            "DEADLINE_MS": ("INT32", (1,), 9000),
            "PRIORITY": ("INT32", (1,), 1),
        }
    ]


@both
def test_what_is_not_given_is_not_sent(url: str, painter: Painter, generate: Generate) -> None:
    generate(url, "a kite", seed=0, width=None)
    assert set(painter.requests[0]) == {"PROMPT", "SEED"}
    assert painter.outputs == [["IMAGE", "SEED_USED", "INFO"]]


@both
def test_result_has_image_seed_and_times(url: str, generate: Generate) -> None:
    result = generate(url, "a kite", width=96, height=64, seed=7, num_inference_steps=9)
    assert result.image.size == (96, 64)
    assert result.image.getpixel((5, 5)) == (7, 20, 30)
    assert (result.seed, result.steps, result.shared_steps) == (7, 9, 7)
    assert (result.queue_ms, result.encode_ms, result.denoise_ms, result.decode_ms) == (1.5, 2.5, 1234.5, 3.5)
    assert result.data.startswith(b"\x89PNG")
    assert generate(url, "a kite").seed == 4242  # drawn by the server


@both
def test_raw_pixels_become_an_image(url: str, painter: Painter, generate: Generate) -> None:
    result = generate(url, "a kite", width=32, height=16, seed=9, output_format="raw")
    assert painter.outputs == [["PIXELS", "SEED_USED", "INFO"]]
    assert np.array_equal(np.asarray(result.image), np.full((16, 32, 3), (9, 20, 30), np.uint8))
    assert result.data == b""


@both
def test_refusal_is_plain_and_has_its_code(url: str, generate: Generate) -> None:
    with pytest.raises(GenerationError) as caught:
        generate(url, "refuse: WIDTH = 65: must be a multiple of 16")
    assert caught.value.code == "INVALID_ARG"
    assert caught.value.message == str(caught.value) == "WIDTH = 65: must be a multiple of 16"
    with pytest.raises(GenerationError) as caught:
        generate(url, "busy")
    assert (caught.value.code, caught.value.message) == ("UNAVAILABLE", "full: the waiting room")


def test_cancelled_over_http_is_told_apart_from_invalid(painter: Painter) -> None:
    """Triton's HTTP status is 400 for both."""
    with serve_http(painter) as url:
        for message, code in {
            "DEADLINE_MS = 5: the deadline passed after 2 steps": "CANCELLED",
            "cancelled by the client after 3 steps": "CANCELLED",
            "DEADLINE_MS = 0: must be between 1 and 2147483647": "INVALID_ARG",
            "PROMPT = 'cancelled by fate': is too long": "INVALID_ARG",
        }.items():
            with pytest.raises(GenerationError) as caught:
                blocking(url, f"refuse: {message}")
            assert (caught.value.code, caught.value.message) == (code, message)


@both
@pytest.mark.parametrize("scheme", ["", "grpc://"])
def test_no_server(generate: Generate, scheme: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        server = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(GenerationError) as caught:
        generate(scheme + server, "a kite")
    assert caught.value.code == "UNAVAILABLE"
    assert caught.value.message == f"no server at {server}: start one with `ditpack serve`"


@both
def test_no_answer_within_the_timeout(url: str, generate: Generate) -> None:
    began = time.monotonic()
    with pytest.raises(GenerationError) as caught:
        generate(url, "slow", timeout=0.2)
    assert time.monotonic() - began < SLOW_S
    assert caught.value.code == "TIMEOUT"
    assert caught.value.message.endswith("within 0.2 s")


@both
def test_connection_closed_without_an_answer(generate: Generate) -> None:
    with listener(lambda connection: connection.recv(100)) as url, pytest.raises(GenerationError) as caught:
        generate(url, "a kite")
    assert caught.value.code == "UNAVAILABLE"
    assert "closed the connection" in caught.value.message


@both
def test_http_spoken_to_a_port_that_is_not(generate: Generate) -> None:
    def answer_in_http2(connection: socket.socket) -> None:
        with connection.makefile("rb") as request:  # to its end: closed on the rest, a connection may lose the answer
            request.readline()
            request.read(int(http.client.parse_headers(request)["Content-Length"]))
        connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18))  # an HTTP/2 SETTINGS frame

    with listener(answer_in_http2) as url, pytest.raises(GenerationError) as caught:
        generate(url, "a kite")
    assert (caught.value.code, "is that its gRPC port?" in caught.value.message) == ("UNAVAILABLE", True)


@both
def test_grpc_spoken_to_an_http_port(painter: Painter, generate: Generate) -> None:
    with serve_http(painter) as url, pytest.raises(GenerationError) as caught:
        generate(f"grpc://{url}", "a kite")
    assert (caught.value.code, "is that its HTTP port?" in caught.value.message) == ("UNAVAILABLE", True)


REFUSED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:[::1]:1: {}"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (REFUSED.format("Failed to connect to remote host: Connection refused"), "no server at host:1"),
        ("errors resolving host:1: [field:hostname lookup error: Domain name not found]", "no server at host:1"),
        ("DNS resolution failed for host:1", "no server at host:1"),
        (REFUSED.format("Socket closed"), "is that its HTTP port?"),  # what tritonserver 2.51 does
        (REFUSED.format("Failed parsing HTTP/2 (Expected SETTINGS frame)"), "is that its HTTP port?"),
        ("Socket closed", "closed the connection"),
        ("the waiting room is full: socket closed", "the waiting room is full"),
        ("[request id: 7] Exceeds maximum queue size", "Exceeds maximum queue size"),
    ],
)
def test_what_grpc_calls_unavailable_is_told_apart(message: str, expected: str) -> None:
    with pytest.raises(GenerationError) as caught, plain_errors("host:1", 5):
        raise InferenceServerException(message, status="StatusCode.UNAVAILABLE")
    assert caught.value.code == "UNAVAILABLE"
    assert expected in caught.value.message


def test_unknown_model(painter: Painter) -> None:
    with serve_http(painter) as url, Client(url, model="nope") as client, pytest.raises(GenerationError) as caught:
        client.generate("a kite", timeout=20)
    assert caught.value.code == "NOT_FOUND"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"width": 64.5}, "WIDTH"),
        ({"height": 2**31}, "HEIGHT"),
        ({"seed": "7"}, "SEED"),
        ({"true_cfg_scale": "much"}, "TRUE_CFG_SCALE"),
        ({"negative_prompt": 3}, "NEGATIVE_PROMPT"),
        ({"negative_prompt": "\ud800"}, "NEGATIVE_PROMPT"),
    ],
)
def test_value_that_its_type_cannot_hold_is_refused_here(settings: dict[str, object], field: str) -> None:
    with Client() as client, pytest.raises(GenerationError) as caught:
        client.generate("a kite", **settings)
    assert caught.value.code == "INVALID_ARG"
    assert caught.value.message.startswith(f"{field} = ")


def test_programming_mistakes() -> None:
    with Client() as client:
        with pytest.raises(TypeError, match="unknown setting 'step'"):
            client.generate("a kite", step=3)
        with pytest.raises(ValueError, match="above 0"):
            client.generate("a kite", timeout=0)


REQUESTS: list[ImageRequest] = [{"prompt": "slow", "seed": 1}, {"prompt": "busy"}] + [
    {"prompt": "slow", "seed": seed} for seed in range(2, 8)
]


def seeds(outcomes: list[tuple[int, ImageResult | GenerationError]]) -> dict[int, int | str]:
    return {index: end.code if isinstance(end, GenerationError) else end.seed for index, end in outcomes}


def test_many_at_once_really_run_at_once(url: str, painter: Painter) -> None:
    began = time.monotonic()
    with Client(url) as client:
        outcomes = list(client.generate_many(REQUESTS, concurrency=8, timeout=20))
    assert time.monotonic() - began < 3 * SLOW_S  # one by one they take 7 × SLOW_S
    assert painter.at_once >= 7
    assert outcomes[0][0] == 1  # the refused one ends first: yielded as they finish
    assert seeds(outcomes) == {0: 1, 1: "UNAVAILABLE", **{index: index for index in range(2, 8)}}


def test_many_at_once_with_asyncio(url: str, painter: Painter) -> None:
    async def run() -> list[tuple[int, ImageResult | GenerationError]]:
        async with AsyncClient(url) as client:
            return [outcome async for outcome in client.generate_many(REQUESTS, concurrency=8, timeout=20)]

    began = time.monotonic()
    outcomes = asyncio.run(run())
    assert time.monotonic() - began < 3 * SLOW_S
    assert painter.at_once >= 7
    assert outcomes[0][0] == 1
    assert seeds(outcomes) == {0: 1, 1: "UNAVAILABLE", **{index: index for index in range(2, 8)}}


def test_concurrency_is_a_limit(url: str, painter: Painter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_kserve, "SLOW_S", 0.2)

    async def run() -> int:
        async with AsyncClient(url) as client:
            return len([one async for one in client.generate_many(REQUESTS[2:], concurrency=2, timeout=20)])

    with Client(url) as client:
        assert len(list(client.generate_many(REQUESTS[2:], concurrency=2, timeout=20))) == 6
    assert asyncio.run(run()) == 6
    assert painter.at_once == 2


def test_leaving_early_sends_no_more(url: str, painter: Painter) -> None:
    with Client(url) as client:
        for _ in client.generate_many([{"prompt": "slow"}] * 12, concurrency=2, timeout=20):
            break
    time.sleep(1.5 * SLOW_S)
    assert len(painter.requests) <= 6


def test_one_client_serves_many_threads(url: str) -> None:
    found: list[int] = []
    with Client(url) as client:
        threads = [
            threading.Thread(target=lambda seed=seed: found.append(client.generate("a", seed=seed, timeout=20).seed))
            for seed in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(found) == list(range(12))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by /proc")
def test_threads_leave_no_open_files(painter: Painter) -> None:
    """tritonclient.http leaves two in every thread that ever used it."""

    def many() -> int:
        with Client(url) as client:
            list(client.generate_many([{"prompt": "a"}] * 16, concurrency=16, timeout=20))
        time.sleep(0.2)  # the fake server closes its ends
        return len(os.listdir("/proc/self/fd"))

    with serve_http(painter) as url:
        before = many()
        assert max(many(), many()) <= before + 4


def test_client_needs_neither_torch_nor_the_server_side() -> None:
    code = (
        "import sys, ditpack_client.cli, ditpack_client.demo; "
        "print(sorted({'torch', 'ditpack', 'diffusers', 'transformers', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("url", "protocol", "address"),
    [
        ("localhost:8000", None, Address("localhost:8000", "http", False)),
        ("localhost:8001", "grpc", Address("localhost:8001", "grpc", False)),
        ("http://host:9000/", "http", Address("host:9000", "http", False)),
        ("https://host", None, Address("host:8000", "http", True)),
        ("grpc://host", None, Address("host:8001", "grpc", False)),
        ("grpcs://[::1]:8001", None, Address("[::1]:8001", "grpc", True)),
    ],
)
def test_addresses(url: str, protocol: str | None, address: Address) -> None:
    assert parse_address(url, protocol) == address


@pytest.mark.parametrize(
    ("url", "protocol", "message"),
    [
        ("ftp://host", None, "'ftp'"),
        ("grpc://host", "http", "contradicts"),
        ("host:8000", "https", "neither"),
        ("", None, "no server address"),
        ("host:port", None, "no server address"),
        ("host:99999", None, "no server address"),
        ("http://host/v2", None, "no server address"),
    ],
)
def test_bad_addresses(url: str, protocol: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Client(url, protocol)
