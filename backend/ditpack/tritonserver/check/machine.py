"""What the machine offers, as far as it can be seen without loading torch: GPUs, memory, the tritonserver."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from ditpack.tritonserver.launch.find import Installation, find_tritonserver
from ditpack.tritonserver.launch.serve_error import ServeError


@dataclass(frozen=True, slots=True)
class Machine:
    """``gpus``: the memory of each in bytes (0: not known). ``ram``: bytes. ``server``: None when none can be found."""

    gpus: tuple[int, ...]
    ram: int
    server: Installation | None = None
    server_error: ServeError | None = None


def this_machine(
    tritonserver: str | Path | None = None, gpus: int | None = None, gpu_gib: float | None = None
) -> Machine:
    """Look around. ``gpus`` and ``gpu_gib`` (of each) describe another machine's GPUs instead of this one's."""
    found = gpu_memory()
    if gpus is not None or gpu_gib is not None:
        each = round(gpu_gib * 2**30) if gpu_gib is not None else max(found, default=0)
        found = (each,) * (gpus if gpus is not None else max(1, len(found)))
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        server = find_tritonserver(tritonserver)
    except ServeError as error:
        return Machine(found, ram, None, error)
    return Machine(found, ram, server)


def gpu_memory() -> tuple[int, ...]:
    """The memory of each GPU that CUDA shows to this process (CUDA_VISIBLE_DEVICES counts); none without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return ()
        found = []
        for ordinal in range(count.value):
            if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device):
                return ()
            found.append(size.value)
    except (OSError, AttributeError):
        return ()
    return tuple(found)
