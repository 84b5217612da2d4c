"""``ditpack probe``: is this server ready, alive, drained? For health checks; the standard library is enough.

Triton's own /v2/health/ready stays 200 when a model's process has died (before 26.04) or its engine hangs, so `alive`
asks for a picture: the smallest, one step, no guidance. When that fails the server may be dead or just busy: the
engine's step counter tells the two apart.
"""

from __future__ import annotations

import enum
import http.client
import json
import re
import sys
import time

_PICTURE = {
    "PROMPT": "probe",
    "WIDTH": 64,
    "HEIGHT": 64,
    "NUM_INFERENCE_STEPS": 1,
    "TRUE_CFG_SCALE": 1,
    "SEED": 0,
    "PRIORITY": 1,  # a long queue is no illness
}
_LOAD = ("ditpack_active_requests", "ditpack_waiting_requests", "nv_inference_pending_request_count")


class Question(enum.StrEnum):
    """What can be asked."""

    READY = "ready"
    ALIVE = "alive"
    DRAINED = "drained"


def probe(
    question: Question,
    host: str = "127.0.0.1",
    port: int = 8000,
    metrics_port: int = 8002,
    model: str = "qwen_image",
    seconds: float = 10,
    interval: float = 1,
) -> None:
    """Say whether a server is ready, alive or drained: exit code 0, or 1 and the reason.

    ready: Triton says so. alive: the ensemble --model makes a small picture within --seconds, or its steps go on.
    drained: wait up to --seconds until nothing is in flight, in three looks --interval seconds apart.
    """
    match question:
        case Question.READY:
            trouble = ready(host, port, seconds)
        case Question.ALIVE:
            trouble = alive(host, port, metrics_port, model, seconds, interval)
        case Question.DRAINED:
            trouble = drained(host, metrics_port, seconds, interval)
    if trouble is not None:
        sys.exit(trouble)


def ready(host: str, port: int, seconds: float) -> str | None:
    """Why it is not, or None; the same below."""
    status, text = _call(host, port, "/v2/health/ready", seconds)
    return None if status == 200 else f"not ready: {status} {text}".strip()


def alive(host: str, port: int, metrics_port: int, model: str, seconds: float, interval: float) -> str | None:
    deadline = time.monotonic() + seconds
    before = _steps(host, metrics_port)
    picture = {**_PICTURE, "RESPONSE_FORMAT": "b64_json"}
    status, text = _call(host, port, f"/v2/models/{model}/generate", seconds, picture)
    if status == 200 or re.search("(WIDTH|HEIGHT) = 64", text):  # a checkpoint of other sizes has somebody to say so
        return None
    while _steps(host, metrics_port) <= before:
        if time.monotonic() >= deadline:
            return f"no picture and no step: {status} {text[:300]}".strip()
        time.sleep(min(interval, 1))
    return None


def drained(host: str, metrics_port: int, seconds: float, interval: float) -> str | None:
    """Wait until nothing is in flight; three looks in a row, as work moves between models."""
    deadline, idle = time.monotonic() + seconds, 0
    while idle < 3:
        status, metrics = _call(host, metrics_port, "/metrics", 5)
        if status != 200:
            return None  # nobody is left to wait for
        idle = 0 if _total(metrics, *_LOAD) else idle + 1
        if time.monotonic() > deadline:
            return f"still busy after {seconds:g} s"
        time.sleep(interval)
    return None


def _steps(host: str, metrics_port: int) -> float:
    return _total(_call(host, metrics_port, "/metrics", 5)[1], "ditpack_steps_total")


def _total(metrics: str, *names: str) -> float:
    """The sum of all series of ``names``."""
    pattern = rf"^(?:{'|'.join(names)})(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))


def _call(host: str, port: int, path: str, seconds: float, body: object = None) -> tuple[int, str]:
    """(HTTP status, text); (0, why) when nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__
    finally:
        connection.close()
