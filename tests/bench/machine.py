"""What a result must say about where it came from, and the ceilings of the machine it was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ditpack.attention import Attention
from ditpack.packing.layout import Row, build_layout


def meta() -> dict[str, Any]:
    """Hardware, versions, commit, date and command of this run."""
    cuda = torch.cuda.is_available()
    packages = ("torch", "diffusers", "transformers", "triton", "flash-attn", "flash-attn-4", "nvidia-cudnn-frontend")
    processor = f"{platform.processor() or platform.machine()} x{torch.get_num_threads()}"
    return {
        "hardware": torch.cuda.get_device_name() if cuda else processor,
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda} | _versions(packages),
        "commit": os.environ.get("DITPACK_COMMIT") or _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
    }


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def milliseconds(call: Callable[[], Any], repeats: int, warmup: int = 1) -> float:
    """Median time of ``call``: by CUDA events on a GPU, by the clock elsewhere.

    ``warmup`` calls come first, or fewer (but two, if it is that many) once they have taken a second.
    """
    begun = time.perf_counter()
    for done in range(warmup):
        if done >= 2 and time.perf_counter() - begun > 1:
            break
        call()
        _synchronize()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            _synchronize()
            start.record()
            call()
            end.record()
            _synchronize()
            times.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - begun))
    return sorted(times)[len(times) // 2]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ceilings(attention: Attention, heads: int, head_dim: int, device: torch.device) -> dict[str, float]:
    """TFLOP/s that the floor of a step is counted by: a large product's, and the attention kernel's on one long row."""
    side = 128 if device.type == "cuda" else 16
    longest = build_layout([Row(60, ((side, side),))], device)
    return {
        "matmul_tflops": matmul_ceiling(device),
        "attention_tflops": attention_ceiling(attention, longest, heads, head_dim, device),
    }


def matmul_ceiling(device: torch.device, size: int = 8192) -> float:
    """TFLOP/s of a square bf16 product on random data."""
    if device.type == "cpu":
        size = 1024
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b, 10, 3) / 1e9


def attention_ceiling(
    attend: Callable[..., Any], layout: Any, heads: int, head_dim: int, device: torch.device
) -> float:
    """TFLOP/s of the packed attention on one long row: the kernel's own best."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = torch.randn(3, layout.tokens, heads, head_dim, dtype=dtype, device=device).unbind(0)
    flops = 4 * sum(length**2 for length in layout.lengths) * heads * head_dim
    return flops / milliseconds(lambda: attend(q, k, v, layout), 10, 3) / 1e9
