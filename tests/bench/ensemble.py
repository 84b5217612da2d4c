"""What Triton and the doors cost: the real ensemble under perf_analyzer against the bare engine, on the same requests.

    python tests/bench/ensemble.py --out tests/bench/results/ensemble.h200.json    # full-size, random weights
    python tests/bench/ensemble.py --checkpoint TINY --sizes 64x64 96x64 --steps 4 --concurrency 1 4    # anywhere

First the server, with as many requests in flight as each concurrency says, of the official sizes in turn; then, after
it has ended, the same requests in this process: as many threads that encode the prompts, submit to the engine and
decode what comes back, with no server, no messages and no other process.
"""

from __future__ import annotations

import argparse
import csv
import json
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import torch
from step_impls import image_request

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.perf_analyzer import PerfAnalyzer, find_or_fetch

from ditpack.engine.engine import Engine
from ditpack.engine.job import Job, Result
from ditpack.errors import DitpackError
from ditpack.models.checkpoint import Checkpoint, open_checkpoint
from ditpack.models.families import load_sampler
from ditpack.models.prompt import PromptTokenizer
from ditpack.models.published import write_published_configs
from ditpack.models.text_encoder import load_text_encoder
from ditpack.models.vae import load_vae_decoder
from ditpack.sampling.knee import default_token_budget
from ditpack.sampling.qwen_image import Conditioning
from ditpack.tritonserver.images import encode_image
from ditpack.tritonserver.launch import TritonServer
from ditpack_client.metrics import read_metrics

OFFICIAL = ["1328x1328", "1664x928", "928x1664", "1472x1104", "1104x1472", "1584x1056", "1056x1584"]
PROMPT = "a red kite above two green trees and a white house in the snow"


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        if options.checkpoint is None:
            options.checkpoint = Path(scratch) / "qwen-image"
            write_published_configs(options.checkpoint)
        checkpoint = open_checkpoint(options.checkpoint, "random")
        tool = find_or_fetch(Path(__file__).resolve().parents[2] / ".cache")
        if isinstance(tool, str):
            raise SystemExit(tool)
        records = through_triton(checkpoint, tool, Path(scratch), options)
        write(records, options)  # what is measured is not lost if the rest fails
        records += bare_engine(checkpoint, options)
    served = {r["concurrency"]: r["images_per_s"] for r in records if r["through"] == "triton"}
    for record in records:
        record["ratio_to_engine"] = None
        if record["through"] == "engine":
            ratio = served[record["concurrency"]] / record["images_per_s"]
            print(f"concurrency {record['concurrency']:2}: Triton has {ratio:.3f} of the bare engine's images/s")
            next(r for r in records if r["concurrency"] == record["concurrency"])["ratio_to_engine"] = round(ratio, 4)
    write(records, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a directory with configs; its weights are not read")
    parser.add_argument("--sizes", nargs="+", default=OFFICIAL)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=4.0)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--bare", nargs="+", type=int, default=[1, 8], help="concurrencies of the bare engine")
    parser.add_argument("--requests", type=int, default=14, help="of each concurrency; at least as many as it says")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def write(records: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.out:
        meta = machine.meta() | {"steps": options.steps, "guidance": options.cfg, "sizes": options.sizes}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"meta": meta, "records": records}, indent=1) + "\n")


def count(concurrency: int, options: argparse.Namespace) -> int:
    """Whole rounds of the sizes, so that every concurrency has the same work a request."""
    least = max(options.requests, concurrency)
    return -(-least // len(options.sizes)) * len(options.sizes)


def through_triton(
    checkpoint: Checkpoint, tool: PerfAnalyzer, scratch: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    inputs = scratch / "inputs.json"
    data = []
    for seed, (width, height) in enumerate(sides(options)):
        data.append(
            {"PROMPT": [PROMPT], "WIDTH": [width], "HEIGHT": [height], "NUM_INFERENCE_STEPS": [options.steps],
             "TRUE_CFG_SCALE": [options.cfg], "SEED": [seed], "OUTPUT_FORMAT": ["jpeg"]}
        )  # fmt: skip
    inputs.write_text(json.dumps({"data": data}))
    server = TritonServer(None, checkpoint.path, http_port=0, grpc_port=0, metrics_port=0, weights="random")
    records = []
    with server:
        server.wait_ready(400)
        for concurrency in options.concurrency:
            report = scratch / f"{concurrency}.csv"
            before, began = read_metrics(server.metrics_url), time.monotonic()
            with gpu_use() as use:
                done = tool.run(
                    *("-m", "qwen_image", "-i", "grpc", "-u", server.grpc_url, "--input-data", str(inputs)),
                    *("--concurrency-range", str(concurrency), "--request-count", str(count(concurrency, options))),
                    *("-f", str(report)),
                    timeout=400,
                )
            seconds = time.monotonic() - began
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            moved = {name: value - before.get(name, 0) for name, value in read_metrics(server.metrics_url).items()}
            with report.open() as file:
                (row,) = csv.DictReader(file)
            record = {
                "through": "triton",
                "concurrency": concurrency,
                "images_per_s": float(row["Inferences/Second"]),
                **{f"{p}_s": float(row[f"{p} latency"]) / 1e6 for p in ("p50", "p90", "p95", "p99")},
                "mean_pack": round(moved["ditpack_step_requests_total"] / moved["ditpack_steps_total"], 2),
                "engine_idle_share": round(1 - moved["ditpack_step_seconds_total"] / seconds, 4),
                "gpu_busy_percent": use(),
            }
            records.append(record)
            print(json.dumps(record), flush=True)
    return records


def bare_engine(checkpoint: Checkpoint, options: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sampler = load_sampler(checkpoint, device, dtype)
    engine = Engine(sampler, token_budget=default_token_budget(sampler), max_queue_size=64)
    encoder, decoder = load_text_encoder(checkpoint, device, dtype), load_vae_decoder(checkpoint, device, dtype)
    ids = [PromptTokenizer(checkpoint).encode(text) for text in (PROMPT, " ")]

    def generate(number: int) -> float:
        """Make one image; seconds it took."""
        started = time.monotonic()
        width, height = sides(options)[number % len(options.sizes)]
        request = image_request(width, height, options.steps, options.cfg, number)
        answers: queue.SimpleQueue[Result | DitpackError] = queue.SimpleQueue()
        job = Job(request, str(number), Conditioning(*encoder.encode(ids)), answers.put)
        engine.submit(job)
        result = answers.get(timeout=400)
        if isinstance(result, DitpackError):
            raise result
        encode_image(decoder.decode([result.latents])[0], "jpeg", "bytes")
        return time.monotonic() - started

    def on_own_stream(number: int) -> float:
        if device.type == "cpu":
            return generate(number)
        with torch.cuda.stream(torch.cuda.Stream()):  # or the decoder would wait for the engine's steps
            return generate(number)

    records = []
    for concurrency in options.bare:
        with gpu_use() as use, ThreadPoolExecutor(concurrency) as clients:
            began = time.monotonic()
            latencies = sorted(clients.map(on_own_stream, range(count(concurrency, options))))
            seconds = time.monotonic() - began
        record = {
            "through": "engine",
            "concurrency": concurrency,
            "images_per_s": round(len(latencies) / seconds, 4),
            **{f"p{p}_s": round(latencies[int(len(latencies) * p / 100)], 3) for p in (50, 90, 95, 99)},
            "gpu_busy_percent": use(),
        }
        records.append(record)
        print(json.dumps(record), flush=True)
    engine.close(30)
    return records


def sides(options: argparse.Namespace) -> list[tuple[int, int]]:
    return [tuple(map(int, size.split("x"))) for size in options.sizes]  # type: ignore[misc]


@contextmanager
def gpu_use() -> Iterator[Any]:
    """Yields a function that says in how many percent of the time a kernel ran, by nvidia-smi; None without one."""
    if not torch.cuda.is_available():
        yield lambda: None
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        ended: list[str] = []

        def mean() -> float:
            values = [float(line) for line in ended[0].split()]
            return round(sum(values) / max(1, len(values)), 1)

        try:
            yield mean
        finally:
            process.terminate()
            ended.append(process.communicate()[0])


if __name__ == "__main__":
    main()
