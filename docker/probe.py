"""Is this server ready, alive, drained? For health checks in containers; the standard library is enough.

Triton's own /v2/health/ready stays 200 when a model's process has died (before 26.04) or its engine hangs, so `alive`
asks for a picture: the smallest, one step, no guidance. When that fails the server may be dead or just busy: the
engine's step counter tells the two apart.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import time

PICTURE = {"PROMPT": "probe", "WIDTH": 64, "HEIGHT": 64, "NUM_INFERENCE_STEPS": 1, "TRUE_CFG_SCALE": 1, "SEED": 0}
LOAD = ("ditpack_active_requests", "ditpack_waiting_requests", "nv_inference_pending_request_count")


def call(host: str, port: int, path: str, seconds: float, body: object = None) -> tuple[int, str]:
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


def total(metrics: str, *names: str) -> float:
    """The sum of all series of ``names``."""
    pattern = rf"^(?:{'|'.join(names)})(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))


def ready(options: argparse.Namespace) -> str | None:
    status, text = call(options.host, options.port, "/v2/health/ready", options.seconds)
    return None if status == 200 else f"not ready: {status} {text}".strip()


def alive(options: argparse.Namespace) -> str | None:
    """Why the server is not, or None."""
    deadline = time.monotonic() + options.seconds
    before = steps(options)
    path = f"/v2/models/{options.model}/generate"
    status, text = call(options.host, options.port, path, options.seconds, {**PICTURE, "RESPONSE_FORMAT": "b64_json"})
    if status == 200 or re.search("(WIDTH|HEIGHT) = 64", text):  # a checkpoint of other sizes has somebody to say so
        return None
    while steps(options) <= before:
        if time.monotonic() >= deadline:
            return f"no picture and no step: {status} {text[:300]}".strip()
        time.sleep(min(options.interval, 1))
    return None


def steps(options: argparse.Namespace) -> float:
    return total(call(options.host, options.metrics_port, "/metrics", 5)[1], "ditpack_steps_total")


def drained(options: argparse.Namespace) -> str | None:
    """Wait until nothing is in flight, at most ``--seconds``; three looks in a row, as work moves between models."""
    deadline, idle = time.monotonic() + options.seconds, 0
    while idle < 3:
        status, metrics = call(options.host, options.metrics_port, "/metrics", 5)
        if status != 200:
            return None  # nobody is left to wait for
        idle = 0 if total(metrics, *LOAD) else idle + 1
        if time.monotonic() > deadline:
            return f"still busy after {options.seconds:g} s"
        time.sleep(options.interval)
    return None


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=("ready", "alive", "drained"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("--model", default="qwen_image", help="the ensemble that alive asks")
    parser.add_argument("--seconds", type=float, default=10, help="the longest that the answer may take")
    parser.add_argument("--interval", type=float, default=1, help="seconds between two looks of drained")
    options = parser.parse_args()
    return {"ready": ready, "alive": alive, "drained": drained}[options.question](options)


if __name__ == "__main__":
    sys.exit(main())
