"""Concurrent requests share denoising steps: the metrics say so, and the clock does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from server_tools import TIMEOUT, assert_same_picture, load, metric, wait_until

from ditpack.tritonserver.launch import TritonServer
from ditpack_client import Client, ImageRequest, ImageResult

pytestmark = pytest.mark.server

SIZES = [(64, 64), (96, 64), (64, 96), (80, 48), (128, 64), (48, 48)]
# Twelve requests of six sizes and as many step counts, guided and not; long, so that what is measured is denoising.
REQUESTS: list[ImageRequest] = [
    {
        "prompt": f"a red kite number {index}",
        "width": SIZES[index % 6][0],
        "height": SIZES[index % 6][1],
        "num_inference_steps": 60 + 11 * (index % 6),
        "true_cfg_scale": 1.0 if index % 4 == 3 else 4.0,
        "seed": index,
        "output_format": "raw",
    }
    for index in range(12)
]
ALL_STEPS = sum(request["num_inference_steps"] or 0 for request in REQUESTS)


def ask(client: Client, requests: list[ImageRequest]) -> tuple[float, list[ImageResult]]:
    """All at once: the seconds until the last answer, and the results in order."""
    started = time.monotonic()
    results = dict(client.generate_many(requests, concurrency=len(requests), timeout=TIMEOUT))
    seconds = time.monotonic() - started
    made = [results[index] for index in range(len(requests))]
    for result in made:
        assert isinstance(result, ImageResult), result
    return seconds, [result for result in made if isinstance(result, ImageResult)]


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url, "grpc") as opened:
        yield opened


def test_twelve_requests_share_steps_and_save_time(server: TritonServer, client: Client) -> None:
    def counters() -> npt.NDArray[np.float64]:
        names = ("ditpack_steps_total", "ditpack_step_requests_total", "ditpack_shared_steps_total")
        return np.array([metric(server, name) for name in names])

    ask(client, [{**request, "num_inference_steps": 2} for request in REQUESTS])  # first calls are slow: not measured
    wait_until("an idle engine", lambda: load(server) == (0, 0))

    # Half of the solo times before and half after, so that a drift of the machine's speed meets both sides.
    alone = [ask(client, [request]) for request in REQUESTS[:6]]
    before = counters()
    together_seconds, together = ask(client, REQUESTS)
    steps, step_requests, shared = counters() - before
    alone += [ask(client, [request]) for request in REQUESTS[6:]]
    alone_seconds = sum(seconds for seconds, _ in alone)

    print(
        f"{ALL_STEPS} steps of 12 requests in {steps:.0f} forwards, {shared:.0f} shared, mean pack "
        f"{step_requests / steps:.2f}; {together_seconds:.2f} s together, {alone_seconds:.2f} s one by one, "
        f"ratio {together_seconds / alone_seconds:.2f}"
    )
    assert step_requests == ALL_STEPS, "every request takes each of its steps once"
    assert step_requests / steps > 1.5
    assert steps < ALL_STEPS / 1.5
    assert shared > steps / 2
    assert together_seconds < alone_seconds

    for result, (_, (solo,)) in zip(together, alone, strict=True):
        assert_same_picture(np.asarray(result.image), np.asarray(solo.image))
        assert solo.shared_steps == 0
        assert result.shared_steps > 0
        assert result.steps == solo.steps == result.info["request"]["num_inference_steps"]
        assert 1 < result.info["pack"]["requests_mean"] <= result.info["pack"]["requests_max"] <= 12


def test_a_late_request_joins_those_in_flight(server: TritonServer, client: Client) -> None:
    """Between steps, not after them: it comes while the long one is under way and is answered before it."""
    long: ImageRequest = {**REQUESTS[0], "num_inference_steps": 200, "width": 256, "height": 256}
    short: ImageRequest = {**REQUESTS[3], "num_inference_steps": 3}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, client, [long])
        wait_until("the long request in flight", lambda: load(server)[0] == 1)
        _, (late,) = ask(client, [short])
        assert not first.done()
        _, (early,) = first.result(TIMEOUT)
    assert late.shared_steps == early.shared_steps == 3
    assert (late.steps, early.steps) == (3, 200)
