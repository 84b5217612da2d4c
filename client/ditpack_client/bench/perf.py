"""Finding perf_analyzer, running one level of load with it, and reading what it wrote."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HOW_TO_GET = """perf_analyzer is not on PATH. To get one:
  pip install perf-analyzer                      Linux on x86_64 with glibc 2.38 or newer (Ubuntu 24.04)
  docker run --rm -it --net host nvcr.io/nvidia/tritonserver:26.10-py3-sdk    it is in there
or name one with --perf-analyzer."""


class BenchError(Exception):
    """The load test cannot run; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Load:
    """One level: ``concurrency`` requests always in flight, or ``rate`` arriving a second (Poisson)."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g} a second"

    def arguments(self) -> list[str]:
        if self.concurrency:
            return ["--concurrency-range", str(self.concurrency)]
        return ["--request-rate-range", f"{self.rate:g}", "--request-distribution", "poisson"]


@dataclass(frozen=True, slots=True)
class Timing:
    """What one level came to: when each request was sent and answered, in seconds."""

    sent: tuple[float, ...]
    answered: tuple[float, ...]

    @property
    def latencies(self) -> list[float]:
        return [end - start for start, end in zip(self.sent, self.answered, strict=True)]

    @property
    def throughput(self) -> float:
        """Images a second, from the first request to the last answer."""
        return len(self.sent) / (max(self.answered) - min(self.sent))

    @property
    def arrived(self) -> float:
        """Requests a second that perf_analyzer did send, perhaps fewer than it was asked for; 0 for a single one."""
        between = max(self.sent) - min(self.sent)
        return (len(self.sent) - 1) / between if between else 0.0

    def percentile(self, share: float) -> float:
        """The latency that ``share`` (0 to 1) of the requests do not exceed: the nearest one that was measured."""
        ordered = sorted(self.latencies)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def find(explicit: Path | None) -> Path:
    """Raises BenchError, with the ways to get one, when there is no perf_analyzer."""
    found = str(explicit) if explicit else shutil.which("perf_analyzer")
    if found is None:
        raise BenchError(_HOW_TO_GET)
    if not os.access(found, os.X_OK):
        raise BenchError(f"--perf-analyzer {found} is no executable file.")
    return Path(found)


def run(
    binary: Path,
    *,
    address: str,
    protocol: str,
    model: str,
    data: Path,
    load: Load,
    count: int,
    timeout: float,
    directory: Path,
) -> Timing:
    """``count`` requests of ``data`` at ``load``.

    A number of requests, not a window of time: perf_analyzer's windows are made for milliseconds, and one that is
    shorter than a few images measures nothing. Its files stay in ``directory``.

    Raises:
        BenchError: perf_analyzer failed, took longer than ``timeout`` seconds, or measured nothing.
    """
    export = directory / f"{str(load).replace(' ', '_')}.json"
    export.unlink(missing_ok=True)  # perf_analyzer refuses to replace it
    command = [
        *(str(binary), "-m", model, "-u", address, "-i", protocol, "--input-data", str(data), *load.arguments()),
        *("--request-count", str(count)),
        *("--profile-export-file", str(export)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{load}: perf_analyzer was not done after {timeout:.0f} s; it was ended.") from None
    except OSError as error:
        raise BenchError(f"{binary} does not run: {error.strerror}.") from None
    if done.returncode != 0 or not export.is_file():
        said = [line.strip() for line in f"{done.stderr}\n{done.stdout}".splitlines() if line.strip()]
        why = next((line for line in said if re.search("fail|error|invalid|unrecog", line, re.IGNORECASE)), said[-1:])
        raise BenchError(f"{load}: perf_analyzer ended with {done.returncode}: {why}")
    return read_export(json.loads(export.read_text()))


def read_export(document: dict[str, Any]) -> Timing:
    """The requests of perf_analyzer's profile export, whose times are nanoseconds.

    Raises:
        BenchError: none was answered.
    """
    done = [
        (request["timestamp"] / 1e9, request["response_timestamps"][-1] / 1e9)
        for experiment in document["experiments"]
        for request in experiment["requests"]
        if request["response_timestamps"]
    ]
    if not done:
        raise BenchError("perf_analyzer got no answer; the server's log says why.")
    return Timing(tuple(start for start, _ in done), tuple(end for _, end in done))
