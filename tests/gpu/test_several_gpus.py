"""Sequence and row parallelism over NCCL against one GPU; with a single GPU, as the only rank of its group.

The engine's process takes part in none of it, so what goes wrong on a GPU is met as on the CPU (unit/test_workers.py).
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_sampler import REQUESTS, denoise

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from engine_tools import Ticket, conditioning, engine, request
from worker_tools import alive, parallel_sampler

from ditpack.engine.job import Result
from ditpack.errors import Unavailable
from ditpack.models.checkpoint import open_checkpoint
from ditpack.parallel.rows import share_rows
from ditpack.parallel.ulysses import Ulysses
from ditpack.sampling.qwen_image import load_sampler


def compare(rank: int, ranks: int, path: Path, store: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=3)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks, timeout=timeout, device_id=device)
    group = dist.group.WORLD
    assert group is not None
    checkpoint = open_checkpoint(path)
    for quantization in ("none", "fp8"):
        plain = load_sampler(checkpoint, device, torch.bfloat16, "auto", quantization)
        plain.run_eagerly()
        expected = denoise(plain, REQUESTS)
        for mode in ("segment", "masked", "rows"):
            sampler = load_sampler(checkpoint, device, torch.bfloat16, "auto", quantization)
            sampler.run_eagerly()
            if mode == "rows":
                share_rows(sampler.transformer, group)
            else:
                Ulysses(sampler.transformer, group, mode)
            for ours, exact in zip(denoise(sampler, REQUESTS), expected, strict=True):
                error = float((ours - exact).norm() / exact.norm())
                assert error < 2e-2, f"{quantization} {mode}: {error}"
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_one_gpu(ranks: int, embedded_checkpoint: Path, tmp_path: Path) -> None:
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    torch.multiprocessing.spawn(compare, args=(ranks, embedded_checkpoint, f"file://{tmp_path}/store"), nprocs=ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("parallel", ["tokens", "rows"])
def test_workers(parallel: str, ranks: int, embedded_checkpoint: Path) -> None:
    """The engine over workers equals one GPU; one that is killed fails what is in flight, and the next are served."""
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    devices = tuple(f"cuda:{rank}" for rank in range(ranks))
    checkpoint = open_checkpoint(embedded_checkpoint)
    one = load_sampler(checkpoint, torch.device("cuda:0"), torch.bfloat16, "auto", "none")
    one.run_eagerly()
    expected = denoise(one, REQUESTS)
    sampler = parallel_sampler(embedded_checkpoint, devices=devices, dtype=torch.bfloat16, parallel=parallel)
    pids = sampler.pids
    served = engine(sampler)
    width = checkpoint.transformer_config["joint_attention_dim"]
    tickets = [Ticket(each, conditioning=conditioning(each, width)) for each in REQUESTS]
    for ticket in tickets:
        served.submit(ticket.job)
    for ticket, exact in zip(tickets, expected, strict=True):
        assert float((ticket.latents() - exact).norm() / exact.norm()) < 2e-2

    endless = request(num_inference_steps=200)
    lost = Ticket(endless, conditioning=conditioning(endless, width))
    served.submit(lost.job)
    time.sleep(0.2)
    os.kill(pids[-1], signal.SIGKILL)
    assert isinstance(lost.outcome(), Unavailable)
    until = time.monotonic() + 120
    while not served.healthy:
        assert time.monotonic() < until
        time.sleep(0.1)
    again = Ticket(REQUESTS[0], conditioning=conditioning(REQUESTS[0], width))
    served.submit(again.job)
    assert isinstance(again.outcome(), Result)
    pids += sampler.pids
    served.close(10)
    assert alive(pids) == []
