"""Sequence and row parallelism over NCCL against one GPU; with a single GPU, as the only rank of its group."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_sampler import REQUESTS, denoise

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
