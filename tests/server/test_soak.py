"""200 mixed requests with bad ones, cancels and deadlines: each is answered once, and nothing is left of them.

The long one, with streams and cancels by id: ``python tests/bench/soak.py --minutes 10``.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from server_tools import (
    TIMEOUT,
    Caller,
    code,
    load,
    logged_requests,
    metric,
    outcomes,
    regions,
    tensors,
    threads,
    wait_until,
)
from stages import dit_inputs
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer

pytestmark = pytest.mark.server

CONCURRENCY = 16
SIZES = [(64, 64), (96, 64), (64, 96), (48, 80), (128, 64), (32, 32)]
BAD: list[dict[str, Any]] = [
    {"PROMPT": " "},
    {"WIDTH": 65},
    {"HEIGHT": -64},
    {"NUM_INFERENCE_STEPS": 0},
    {"TRUE_CFG_SCALE": 0.5},
    {"SEED": -1},
    {"OUTPUT_FORMAT": "gif"},
    {"PROMPT": b"\xff"},
]


@dataclass(frozen=True)
class Planned:
    id: str
    kind: str  # good, bad, deadline (too short to be met), cancel (by the client, through the ensemble), drop (HTTP)
    protocol: str
    values: dict[str, Any]
    patience: float = TIMEOUT  # seconds until the client cancels


def plan(count: int, seed: int, prefix: str) -> list[Planned]:
    """Of each ten: six good, one bad, one with a deadline that passes, two that the client gives up."""
    chance = random.Random(seed)
    planned = []
    for index in range(count):
        kind = ("good", "good", "bad", "good", "cancel", "good", "deadline", "good", "cancel", "good")[index % 10]
        width, height = chance.choice(SIZES)
        values: dict[str, Any] = {
            "PROMPT": "a red kite" + " over a blue sea" * chance.randrange(8),
            "WIDTH": width,
            "HEIGHT": height,
            "NUM_INFERENCE_STEPS": chance.randint(1, 24),
            "SEED": index,
            "TRUE_CFG_SCALE": chance.choice([1.0, 2.5, 4.0]),
            "OUTPUT_FORMAT": chance.choice(["png", "jpeg", "webp", "raw"]),
        }
        patience = TIMEOUT
        if kind == "bad":
            values |= BAD[(index // 10) % len(BAD)]
        elif kind == "deadline":
            values |= {"NUM_INFERENCE_STEPS": 200, "DEADLINE_MS": chance.choice([1, 20, 40, 60])}
        elif kind == "cancel":
            values["NUM_INFERENCE_STEPS"] = 100
            patience = chance.uniform(0.0, 0.4)
        protocol = chance.choice(["http", "grpc"])
        planned.append(Planned(f"{prefix}-{index}", kind, protocol, values, patience))
    return planned


async def send_all(server: TritonServer, planned: list[Planned]) -> dict[str, str]:
    """Each request's one outcome by its id: "ok", a Triton code, or "gave up"."""
    http = tritonclient.http.aio.InferenceServerClient(
        server.http_url.removeprefix("http://"), conn_limit=CONCURRENCY, conn_timeout=TIMEOUT
    )
    grpc = tritonclient.grpc.aio.InferenceServerClient(server.grpc_url)
    slots = asyncio.Semaphore(CONCURRENCY)

    async def send(request: Planned) -> str:
        if request.protocol == "http":
            call = http.infer("qwen_image", tensors(tritonclient.http, request.values), request_id=request.id)
        else:
            inputs = tensors(tritonclient.grpc, request.values)
            call = grpc.infer("qwen_image", inputs, request_id=request.id, client_timeout=TIMEOUT)
        try:
            async with asyncio.timeout(request.patience):
                result = await call
        except TimeoutError:
            return "gave up"
        except InferenceServerException as error:
            if code(error) == "INVALID_ARG" and "the deadline passed" in str(error):
                return "CANCELLED"  # 400 over HTTP, which has no status for it
            return code(error)
        facts = json.loads(result.as_numpy("INFO").item())
        assert facts["request"]["seed"] == request.values["SEED"], "somebody else's answer"
        return "ok"

    async def one(request: Planned) -> tuple[str, str]:
        async with slots:
            return request.id, await send(request)

    try:
        async with asyncio.timeout(4 * TIMEOUT):
            return dict(await asyncio.gather(*map(one, planned)))
    finally:
        await http.close()
        await grpc.close()


def idle(server: TritonServer) -> bool:
    pending = metric(server, "nv_inference_pending_request_count")
    return load(server) == (0, 0) and pending == 0


def settle(server: TritonServer) -> None:
    """Wait until all that was sent has ended, given-up requests too."""
    quiet = 0
    deadline = time.monotonic() + TIMEOUT
    while quiet < 5:
        quiet = quiet + 1 if idle(server) else 0
        assert time.monotonic() < deadline, "the server did not come to rest"
        time.sleep(0.1)


def test_200_mixed_requests(server: TritonServer) -> None:
    asyncio.run(send_all(server, plan(40, seed=1, prefix="warm")))  # pools of threads and memory find their size
    settle(server)
    threads_before, regions_before, counted_before = threads(server), regions(server), outcomes(server)

    planned = plan(200, seed=2, prefix="soak")
    started = time.monotonic()
    ended = asyncio.run(send_all(server, planned))
    seconds = time.monotonic() - started
    settle(server)
    counted = {name: now - counted_before[name] for name, now in outcomes(server).items()}
    kinds = {kind: Counter(ended[p.id] for p in planned if p.kind == kind) for kind in {p.kind for p in planned}}
    print(f"{seconds:.1f} s; {kinds}; counted {counted}")

    assert len(ended) == 200
    assert kinds["good"] == {"ok": 120}
    assert kinds["bad"] == {"INVALID_ARG": 20}
    assert kinds["deadline"] == {"CANCELLED": 20}
    assert kinds["cancel"].keys() <= {"ok", "gave up"}
    assert kinds["cancel"]["gave up"] > 20, "too few gave up to test anything"

    # The server's books. A given-up request ends in any way or, cancelled between two models, in none of them.
    given_up = kinds["cancel"]["gave up"]
    certain = 120 + kinds["cancel"]["ok"]
    assert counted["failed"] == counted["unavailable"] == 0
    assert counted["invalid"] == 20
    assert certain <= counted["ok"] <= certain + given_up
    assert counted["deadline"] == 20
    assert counted["cancelled"] <= given_up

    # Once each: the log has one ending for every request, with the outcome that its client saw.
    endings = Counter(line["id"] for line in logged_requests(server) if line["id"].startswith("soak-"))
    assert not [request for request, count in endings.items() if count > 1]
    logged = {line["id"]: line["outcome"] for line in logged_requests(server)}
    names = {"ok": "ok", "INVALID_ARG": "invalid", "CANCELLED": "deadline"}
    for request, outcome in ended.items():
        if outcome != "gave up":
            assert logged[request] == names[outcome]
    assert sum(counted.values()) == sum(endings.values())

    assert load(server) == (0, 0)
    wait_until(
        f"no more threads than before the soak ({threads_before}, now {threads(server)})",
        lambda: threads(server) <= threads_before,
        timeout=15,
    )
    assert regions(server).keys() == regions_before.keys()
    growth = sum(regions(server).values()) - sum(regions_before.values())
    assert growth <= 2 * 2**20, f"shared memory grew by {growth} bytes"


class TestCancelledCalls:
    """Calls to ``dit`` itself: Triton tells a running model of a gRPC client that cancels."""

    @pytest.fixture
    def long(self, grpc_caller: Caller) -> list[Any]:
        inputs = dit_inputs(grpc_caller, {"PROMPT": "a kite", "WIDTH": 512, "HEIGHT": 512, "NUM_INFERENCE_STEPS": 200})
        return tensors(tritonclient.grpc, inputs.values())

    def test_a_cancelled_call_leaves_the_engine(self, server: TritonServer, long: list[Any]) -> None:
        before = outcomes(server)
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        answers: list[Any] = []
        call = client.async_infer("dit", long, lambda result, error: answers.append(error or result), request_id="gone")
        wait_until("it is in flight", lambda: load(server)[0] == 1)
        call.cancel()
        wait_until("it has left", lambda: load(server) == (0, 0))
        wait_until("the client knows", lambda: bool(answers))
        client.close()
        assert code(answers[0]) == "CANCELLED"
        wait_until("it is counted", lambda: outcomes(server)["cancelled"] == before["cancelled"] + 1)
        (line,) = [line for line in logged_requests(server) if line["id"] == "gone"]
        assert (line["model"], line["outcome"]) == ("dit", "cancelled")
        assert "cancelled by the client after" in line["message"]
        assert "after 200" not in line["message"]

    def test_random_cancels_disturb_nobody(self, server: TritonServer, long: list[Any], grpc_caller: Caller) -> None:
        good = {"PROMPT": "a red kite", "NUM_INFERENCE_STEPS": 60, "SEED": 5, "OUTPUT_FORMAT": "raw"}
        alone = grpc_caller.infer(good)["PIXELS"]
        before, chance = outcomes(server), random.Random(3)
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        answers: list[Any] = []
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(grpc_caller.infer, good)
            for _ in range(10):
                call = client.async_infer("dit", long, lambda result, error: answers.append(error or result))
                time.sleep(chance.uniform(0.0, 0.1))
                call.cancel()
            together = future.result(TIMEOUT)["PIXELS"]
        wait_until("ten answers", lambda: len(answers) >= 10)
        settle(server)
        client.close()
        assert np.abs(together.astype(int) - alone.astype(int)).max() <= 1
        assert Counter(map(code, answers)) == {"CANCELLED": 10}
        counted = outcomes(server)
        assert counted["failed"] == before["failed"]
        assert counted["cancelled"] - before["cancelled"] <= 10
