"""A soak: mixed requests at saturation for minutes, by every way in, some of them bad, late, cancelled or abandoned.

    python tests/bench/soak.py --minutes 10 --out tests/bench/results/soak.cpu.json

Every request has an id. What its client saw, the server's log and the server's counters must tell the same story, each
ending once, and memory must not grow in the second half. Exit code 1 when any of it does not hold. It starts a server
of its own, with the tiny checkpoint, on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import machine
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
from server_tools import (
    TIMEOUT,
    code,
    edited_repository,
    family,
    load,
    logged_requests,
    metric,
    outcomes,
    parameter,
    regions,
    serving,
    tensors,
    threads,
)

from ditpack.models.tiny import write_tiny_checkpoint
from ditpack.tritonserver.launch import TritonServer

SIZES = [(64, 64), (96, 64), (64, 96), (48, 80), (128, 64), (32, 32)]
BAD: list[dict[str, Any]] = [
    {"PROMPT": " "},
    {"WIDTH": 65},
    {"NUM_INFERENCE_STEPS": 0},
    {"TRUE_CFG_SCALE": 0.5},
    {"SEED": -1},
    {"PROMPT": b"\xff"},
]
WAYS = ("http", "grpc", "http stream", "grpc stream")
PATIENCE = 3 * TIMEOUT  # seconds; nobody may hang longer
BUDGET = 512  # tokens a step
SAMPLE_S = 5.0
GROWTH = 0.05  # of the third quarter's memory, that the last quarter may have more
_SEEN_AS = {"ok": "ok", "INVALID_ARG": "invalid", "CANCELLED": "cancelled", "UNAVAILABLE": "unavailable"}


@dataclass(frozen=True)
class Planned:
    id: str
    kind: str  # good, bad, deadline, cancel by id, abandon
    way: str
    values: dict[str, Any]


def plan(chance: random.Random) -> Planned:
    """5 % bad, 5 % with a deadline that passes, 5 % cancelled (by id, or by a client that goes away), the rest good."""
    lot = chance.randrange(60)
    kind = {0: "bad", 1: "bad", 2: "bad", 3: "deadline", 4: "deadline", 5: "deadline", 6: "cancel"}.get(lot, "good")
    if lot in (7, 8):
        kind = "abandon"
    width, height = chance.choice(SIZES)
    values: dict[str, Any] = {
        "PROMPT": "a red kite" + " over a blue sea" * chance.randrange(8),
        "WIDTH": width,
        "HEIGHT": height,
        "NUM_INFERENCE_STEPS": chance.randint(1, 12),
        "SEED": chance.randrange(2**31),
        "TRUE_CFG_SCALE": chance.choice([1.0, 2.5, 4.0]),
        "OUTPUT_FORMAT": chance.choice(["png", "jpeg", "webp"]),
    }
    way = chance.choice(WAYS)
    if kind == "bad":
        values |= chance.choice(BAD[:-1] if way == "http stream" else BAD)  # JSON has no bytes
    elif kind == "deadline":
        values |= {"NUM_INFERENCE_STEPS": 200, "DEADLINE_MS": chance.choice([1, 20, 100, 400])}
    elif kind in ("cancel", "abandon"):
        values["NUM_INFERENCE_STEPS"] = 200
    return Planned(f"{chance.getrandbits(128):032x}", kind, way, values)


class Clients:
    """One of each protocol, and the four ways to ask."""

    def __init__(self, server: TritonServer) -> None:
        self._url = server.http_url
        self._http = tritonclient.http.aio.InferenceServerClient(
            server.http_url.removeprefix("http://"), conn_limit=256, conn_timeout=PATIENCE
        )
        self._grpc = tritonclient.grpc.aio.InferenceServerClient(server.grpc_url)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE))

    async def close(self) -> None:
        await self._http.close()
        await self._grpc.close()
        await self._session.close()

    async def ask(self, request: Planned) -> int:
        """Seed of the image that came.

        Raises:
            InferenceServerException: it ended with an error.
        """
        match request.way:
            case "http":
                inputs = tensors(tritonclient.http, request.values)
                result = await self._http.infer("qwen_image", inputs, request_id=request.id)
                return int(result.as_numpy("SEED_USED").item())
            case "grpc":
                inputs = tensors(tritonclient.grpc, request.values)
                result = await self._grpc.infer("qwen_image", inputs, request_id=request.id)
                return int(result.as_numpy("SEED_USED").item())
            case "http stream":
                return await self._http_stream(request)
        return await self._grpc_stream(request)

    async def _http_stream(self, request: Planned) -> int:
        body = request.values | {"RESPONSE_FORMAT": "b64_json", "PREVIEW_EVERY": 4, "id": request.id}
        async with self._session.post(f"{self._url}/v2/models/qwen_image_stream/generate_stream", json=body) as answer:
            async for line in answer.content:
                event = json.loads(line[5:]) if line.startswith(b"data:") else {}
                if "error" in event:
                    raise InferenceServerException(event["error"])
                if "SEED_USED" in event:
                    return int(event["SEED_USED"])
        raise InferenceServerException("the stream ended without an image")

    async def _grpc_stream(self, request: Planned) -> int:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            inputs = tensors(tritonclient.grpc, request.values)
            yield {"model_name": "qwen_image_stream", "inputs": inputs, "request_id": request.id}

        stream = self._grpc.stream_infer(requests())
        try:
            async for result, error in stream:
                if error is not None:
                    raise error
                if (seed := result.as_numpy("SEED_USED")) is not None:
                    return int(seed.item())
        finally:
            stream.cancel()
        raise InferenceServerException("the stream ended without an image")

    async def cancel(self, request_id: str) -> None:
        body = {"ACTION": "cancel", "ID": request_id}
        async with self._session.post(f"{self._url}/v2/models/control/generate", json=body) as answer:
            await answer.read()


def named(error: InferenceServerException) -> str:
    """Triton's code of it; HTTP has 400 for several, and a stream's errors have a text alone."""
    text = str(error)
    if "the deadline passed" in text or "cancelled by" in text:
        return "CANCELLED"
    if error.status() is not None and (found := code(error)) in ("INVALID_ARG", "UNAVAILABLE"):
        return found
    if any(f"{name} = " in text for name in ("PROMPT", "WIDTH", "NUM_INFERENCE_STEPS", "TRUE_CFG_SCALE", "SEED")):
        return "INVALID_ARG"
    return f"{error.status()}: {text}"[:200]


async def serve_one(clients: Clients, request: Planned, chance: random.Random) -> str:
    """How the client saw it end: ok, Triton's code, "abandoned", or "HUNG"."""
    task = asyncio.create_task(clients.ask(request))
    if request.kind in ("cancel", "abandon"):
        await asyncio.wait([task], timeout=chance.uniform(0.0, 1.0))
        if not task.done() and request.kind == "abandon":
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, InferenceServerException):
                await task
            return "abandoned"
        await clients.cancel(request.id)
    try:
        async with asyncio.timeout(PATIENCE):
            seed = await task
    except TimeoutError:
        return "HUNG"
    except InferenceServerException as error:
        return named(error)
    return "ok" if seed == request.values["SEED"] else "SOMEBODY ELSE'S"


def memory(server: TritonServer) -> dict[str, float]:
    """MiB: the processes' own and shared pages, each counted in every process that has it; regions in /dev/shm."""
    assert server.pid is not None
    pages = 0
    for pid in family(server.pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {"rss": pages * 4096 / 2**20, "shm": sum(regions(server).values()) / 2**20, "threads": threads(server)}


async def soak(server: TritonServer, minutes: float, least: int, concurrency: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    clients = Clients(server)
    started = time.monotonic()
    planned: dict[str, Planned] = {}
    ended: dict[str, str] = {}
    seconds: list[float] = []
    samples: list[dict[str, float]] = []

    def goes_on() -> bool:
        return time.monotonic() - started < 60 * minutes or len(planned) < least

    async def worker() -> None:
        while goes_on():
            request = plan(chance)
            planned[request.id] = request
            begun = time.monotonic()
            ended[request.id] = await serve_one(clients, request, chance)
            if ended[request.id] == "ok":
                seconds.append(time.monotonic() - begun)

    async def sampler() -> None:
        while True:
            samples.append({"s": time.monotonic() - started} | await asyncio.to_thread(memory, server))
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sampler())
    try:
        await asyncio.gather(*(worker() for _ in range(concurrency)))
    finally:
        sampling.cancel()
        await clients.close()
    took = time.monotonic() - started
    await asyncio.to_thread(settle, server)
    return {"planned": planned, "ended": ended, "latency": seconds, "samples": samples, "seconds": took}


def settle(server: TritonServer) -> None:
    """Until all that was sent has ended, what was abandoned too."""
    quiet, deadline = 0, time.monotonic() + PATIENCE
    while quiet < 10 and time.monotonic() < deadline:
        idle = load(server) == (0, 0) and metric(server, "nv_inference_pending_request_count") == 0
        quiet = quiet + 1 if idle else 0
        time.sleep(0.2)


def judge(server: TritonServer, run: dict[str, Any], counted: dict[str, int]) -> dict[str, Any]:
    """The figures, and under "wrong" everything that must not be."""
    planned, ended = run["planned"], run["ended"]
    lines = [line for line in logged_requests(server) if line["id"] in planned]
    endings = Counter(line["id"] for line in lines)
    logged = {line["id"]: line["outcome"] for line in lines}
    wrong = [f"{each} ended {count} times in the log" for each, count in endings.items() if count > 1]
    for each, seen in ended.items():
        # CANCELLED on the wire has two names in the books.
        booked = "deadline" if (planned[each].kind, seen) == ("deadline", "CANCELLED") else _SEEN_AS.get(seen)
        if seen != "abandoned" and logged.get(each, "nothing") != booked:
            wrong.append(f"{each} ({planned[each].kind}, {planned[each].way}): client {seen}, log {logged.get(each)}")
    allowed = {
        "good": {"ok", "UNAVAILABLE"},
        "bad": {"INVALID_ARG"},
        "deadline": {"CANCELLED"},
        "cancel": {"CANCELLED", "ok"},
        "abandon": {"abandoned", "ok"},
    }
    kinds = {kind: Counter(ended[r.id] for r in planned.values() if r.kind == kind) for kind in allowed}
    for kind, seen in kinds.items():
        wrong += [f"{kind}: {count} x {name}" for name, count in seen.items() if name not in allowed[kind]]
    in_log = Counter(logged.values())
    if dict(in_log) != {name: count for name, count in counted.items() if count}:
        wrong.append(f"counters say {counted}, the log {dict(in_log)}")
    samples = run["samples"]
    half = samples[len(samples) // 2 :]
    quarters = half[: len(half) // 2], half[len(half) // 2 :]
    memory_mib = {}
    for name in ("rss", "shm", "threads"):
        third, last = (statistics.median(sample[name] for sample in quarter) for quarter in quarters)
        memory_mib[name] = {"first": round(samples[0][name], 1), "third": round(third, 1), "last": round(last, 1)}
        if last > third * (1 + GROWTH):
            wrong.append(f"{name} grew from {third:.1f} in the third quarter to {last:.1f} in the last")
    waits = sorted(run["latency"])
    return {
        "requests": len(planned),
        "seconds": round(run["seconds"], 1),
        "requests_per_s": round(len(planned) / run["seconds"], 2),
        "by_kind": {kind: dict(seen) for kind, seen in kinds.items()},
        "by_way": dict(Counter(r.way for r in planned.values())),
        "counters": counted,
        "log": dict(in_log),
        "abandoned_without_an_ending": sum(seen == "abandoned" and each not in logged for each, seen in ended.items()),
        "latency_s": {"p50": round(waits[len(waits) // 2], 3), "p99": round(waits[int(len(waits) * 0.99)], 3)},
        "memory_by_quarter": memory_mib,
        "samples": [{name: round(value, 1) for name, value in sample.items()} for sample in samples],
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long to go on sending, at least")
    parser.add_argument("--requests", type=int, default=2000, help="how many to send, at least")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    meta = machine.meta()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "checkpoint"
        write_tiny_checkpoint(checkpoint)
        # Room for about five of these requests in a step: the others wait.
        repository = edited_repository(Path(directory) / "models", {"dit": [parameter("token_budget", str(BUDGET))]})
        with serving(checkpoint, Path(directory) / "log", repository) as server:
            before = outcomes(server)
            run = asyncio.run(soak(server, options.minutes, options.requests, options.concurrency, options.seed))
            counted = {name: now - before[name] for name, now in outcomes(server).items()}
            result = judge(server, run, counted)
            result["dropped_by_triton"] = metric(server, "nv_inference_request_failure", reason="CANCELED")
            steps = {
                name: metric(server, f"ditpack_{name}_total") for name in ("steps", "step_requests", "shared_steps")
            }
    settings = {"concurrency": options.concurrency, "seed": options.seed, "checkpoint": "tiny", "token_budget": BUDGET}
    result = {"meta": meta, "settings": settings, **result, "steps": steps}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=1))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
