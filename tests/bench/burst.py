"""What Triton's queue policies cost a burst: twelve requests at once, and when each of them reaches the engine.

With priority levels, a queue limit or time-outs Triton's dynamic batcher does not prefetch: it looks for a free
instance when a request comes, and else every 500 ms. Three servers side by side, with the tiny checkpoint, take turns:

    shipped     no policy in any model
    limits      max_queue_size in prepare, text_encoder, dit and vae_decoder
    priorities  the same, and priority_levels in dit

Needs the server extra; no GPU.

    python tests/bench/burst.py --out tests/bench/results/burst.cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))

import machine
from server_tools import edited_repository, serving

from ditpack.models.tiny import write_tiny_checkpoint
from ditpack_client import Client, ImageRequest, ImageResult

LIMIT = "default_queue_policy { max_queue_size: 2048 }"
PRIORITIES = "priority_levels: 3 default_priority_level: 2"
DELAYED = {"text_encoder", "vae_decoder"}  # their dynamic_batching has a delay, the others' is empty
MODELS = ("prepare", "text_encoder", "dit", "vae_decoder")
SIZES = [(64, 64), (96, 64), (64, 96), (128, 64)]
BURST: list[ImageRequest] = [
    {
        "prompt": f"a red kite number {index}",
        "width": SIZES[index % 4][0],
        "height": SIZES[index % 4][1],
        "num_inference_steps": 8 + index,
        "seed": index,
        "output_format": "raw",
    }
    for index in range(12)
]


def policy(model: str, words: str) -> tuple[str, str]:
    if model in DELAYED:
        return r"dynamic_batching \{\n", f"dynamic_batching {{\n  {words}\n"
    return r"dynamic_batching \{ \}", f"dynamic_batching {{ {words} }}"


def variants() -> dict[str, dict[str, list[tuple[str, str]]]]:
    limits = {model: [policy(model, LIMIT)] for model in MODELS}
    priorities = limits | {"dit": [policy("dit", f"{PRIORITIES} {LIMIT}")]}
    return {"shipped": {}, "limits": limits, "priorities": priorities}


def burst(client: Client) -> dict[str, Any]:
    began = time.perf_counter()
    results = [result for _, result in client.generate_many(BURST, concurrency=len(BURST), timeout=120)]
    seconds = time.perf_counter() - began
    made = [result for result in results if isinstance(result, ImageResult)]
    assert len(made) == len(BURST), results
    steps = sum(result.steps for result in made)
    return {
        "arrival_ms": [result.encode_ms for result in made],
        "decode_ms": [result.decode_ms for result in made],
        "seconds": seconds,
        "pack": sum(result.info["pack"]["requests_mean"] * result.steps for result in made) / steps,
    }


def summary(bursts: list[dict[str, Any]]) -> dict[str, float]:
    arrivals = [value for each in bursts for value in each["arrival_ms"]]
    decodes = [value for each in bursts for value in each["decode_ms"]]
    return {
        "arrival_p50_ms": round(statistics.median(arrivals), 1),
        "arrival_last_p50_ms": round(statistics.median(max(each["arrival_ms"]) for each in bursts), 1),
        "arrival_max_ms": round(max(arrivals), 1),
        "decode_p50_ms": round(statistics.median(decodes), 1),
        "decode_max_ms": round(max(decodes), 1),
        "burst_p50_s": round(statistics.median(each["seconds"] for each in bursts), 3),
        "mean_pack": round(statistics.mean(each["pack"] for each in bursts), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bursts", type=int, default=20, help="for each server")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    meta = machine.meta()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_tiny_checkpoint(directory / "checkpoint")
        clients = {}
        for name, edits in variants().items():
            repository = edited_repository(directory / name, edits)
            server = stack.enter_context(serving(directory / "checkpoint", directory / f"{name}.log", repository))
            clients[name] = stack.enter_context(Client(server.grpc_url, "grpc"))
            burst(clients[name])  # first calls are slow
        bursts: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
        for _ in range(options.bursts):
            for name, client in clients.items():
                bursts[name].append(burst(client))
                time.sleep(0.6)  # every burst meets an idle batcher
    result = {
        "meta": meta,
        "settings": {"requests": len(BURST), "bursts": options.bursts, "checkpoint": "tiny", "triton": "2.51"},
        "servers": {name: summary(each) for name, each in bursts.items()},
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
