"""Every series that we promise is on /metrics, and moves when it should; the log has no prompts unless asked to."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_series
from server_tools import Caller, code, logged_requests, metric, serving, wait_until
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer
from ditpack.tritonserver.series import SERIES

pytestmark = pytest.mark.server

Samples = dict[tuple[str, str], float]  # (name, labels) → value
SMALL = {"PROMPT": "a secret red apple", "WIDTH": 64, "HEIGHT": 64, "NUM_INFERENCE_STEPS": 30, "SEED": 5}
LONG = SMALL | {"WIDTH": 128, "HEIGHT": 128, "NUM_INFERENCE_STEPS": 200}  # seconds, on a CPU
KEPT = ("hits", "misses")
ENDINGS = ("ok", "invalid", "cancelled", "deadline", "unavailable", "failed")


def scrape(server: TritonServer) -> Samples:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    found = (re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line) for line in lines if not line.startswith("#"))
    return {(match[1], match[2] or ""): float(match[3]) for match in found if match}


def expected() -> dict[str, set[str]]:
    """The samples of our table: name → its label's values, or one empty string. Buckets are left out."""
    values = {
        None: {""},
        "outcome": {f'outcome="{ending}"' for ending in ENDINGS},
        "engine": {'engine="dit_0_0"'},
        "model": {'model="text_encoder"'},  # the only one with a cache, where there are no edits
        "stage": {f'stage="{stage}"' for stage in ("encode", "queue", "denoise", "decode")},
    }
    return {
        sample: values[series.label]
        for name, series in SERIES.items()
        for sample in series.samples(name)
        if not sample.endswith("_bucket")
    }


@pytest.fixture(scope="module")
def counting(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server of its own, so that nothing else moves a series; it logs prompts."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DITPACK_LOG_PROMPTS", "1")
            started = stack.enter_context(serving(tiny_checkpoint, tmp_path_factory.mktemp("metrics") / "server.log"))
        yield started


def ending(server: TritonServer, values: dict[str, Any], **options: Any) -> str:
    caller = Caller(server, "grpc")
    try:
        caller.infer(values, **options)
    except InferenceServerException as error:
        return code(error)
    finally:
        caller.close()
    return "ok"


def cancel(server: TritonServer, request_id: str) -> None:
    caller = Caller(server, "http")
    caller.infer(
        {name: np.array([value], np.object_) for name, value in (("ACTION", "cancel"), ("ID", request_id))},
        model="control",
    )
    caller.close()


def test_every_series_is_there_and_moves(counting: TritonServer) -> None:
    before = scrape(counting)
    ours: dict[str, set[str]] = {}
    for name, labels in before:
        if name.startswith("ditpack_") and not name.endswith("_bucket"):
            ours.setdefault(name, set()).add(labels)
    assert ours == expected(), "from the first scrape on, or a rate misses what comes first"
    assert all(value == 0 for (name, _), value in before.items() if name.startswith("ditpack_"))

    # Two that share steps, one of them cancelled while we look at the gauges.
    answers: dict[str, str] = {}

    def send(name: str, values: dict[str, Any]) -> None:
        answers[name] = ending(counting, values, request_id=f"{name}-0123456789abcdef")

    requests = {
        "cancelled": LONG,
        "ok": SMALL,
        "invalid": SMALL | {"WIDTH": 65},
        "deadline": LONG | {"DEADLINE_MS": 300},
    }
    threads = {name: threading.Thread(target=send, args=(name, values)) for name, values in requests.items()}
    for thread in threads.values():
        thread.start()
    wait_until("a pack is shared", lambda: metric(counting, "ditpack_shared_steps_total") > 0)
    during = scrape(counting)
    cancel(counting, "cancelled-0123456789abcdef")
    for thread in threads.values():
        thread.join(60)
    assert answers == {"ok": "ok", "invalid": "INVALID_ARG", "cancelled": "CANCELLED", "deadline": "CANCELLED"}

    engine = 'engine="dit_0_0"'
    assert during["ditpack_active_requests", engine] >= 1
    assert during["ditpack_active_rows", engine] == 2 * during["ditpack_active_requests", engine], "all are guided"
    wait_until("the engine is idle", lambda: scrape(counting)["ditpack_active_requests", engine] == 0)
    after = scrape(counting)
    moved = {key: after[key] - before[key] for key in before if key[0].startswith("ditpack_") and after[key]}
    assert all(value > 0 for value in moved.values())
    for ended in ENDINGS:
        assert moved.get(("ditpack_requests_total", f'outcome="{ended}"'), 0) == (ended in answers)

    steps = moved["ditpack_steps_total", engine]
    assert 200 > steps >= 30
    assert steps == moved["ditpack_eager_forwards_total", ""], "there are no graphs on a CPU"
    for histogram in ("ditpack_step_seconds", "ditpack_step_tokens", "ditpack_step_pad_tokens"):
        assert moved[f"{histogram}_count", ""] == steps
        assert after[f"{histogram}_bucket", 'le="+Inf"'] == steps
    assert moved["ditpack_step_tokens_sum", ""] == moved["ditpack_step_tokens_total", ""]
    assert moved["ditpack_step_seconds_sum", ""] == pytest.approx(moved["ditpack_step_seconds_total", ""])
    assert moved["ditpack_step_requests_total", ""] > steps
    for stage in ("encode", "queue", "denoise", "decode"):
        assert moved["ditpack_stage_seconds_count", f'stage="{stage}"'] == 1, "of the one that got its image"
    assert moved["ditpack_time_to_first_step_seconds_count", ""] == moved["ditpack_request_seconds_count", ""] == 1
    stages = sum(value for (name, _), value in moved.items() if name == "ditpack_stage_seconds_sum")
    assert moved["ditpack_time_to_first_step_seconds_sum", ""] < stages < moved["ditpack_request_seconds_sum", ""]

    still = expected().keys() - {name for name, _ in moved}
    assert still == {
        "ditpack_graph_replays_total",  # needs a GPU
        "ditpack_step_pad_tokens_sum",  # likewise, or several devices
        "ditpack_active_requests", "ditpack_active_rows", "ditpack_waiting_requests",  # it is idle again
    }  # fmt: skip


def test_a_kept_answer_is_counted_and_the_same(counting: TritonServer) -> None:
    caller = Caller(counting, "grpc")
    ids = np.full((1, 50), 5, np.int64)
    counts, answers = [], []
    for _ in range(3):
        counts.append([metric(counting, f"ditpack_cache_{name}_total", model="text_encoder") for name in KEPT])
        answers.append(caller.infer({"INPUT_IDS": ids}, model="text_encoder")["EMBEDS"])
    caller.close()
    hits, misses = counts[0]
    assert counts == [[hits, misses], [hits, misses + 1], [hits + 1, misses + 1]]
    assert answers[0].shape == (1, 50 - 34, 32)
    assert answers[0].tobytes() == answers[1].tobytes() == answers[2].tobytes()


def test_tritons_series_are_there(counting: TritonServer) -> None:
    assert ending(counting, SMALL) == ending(counting, SMALL) == "ok"
    names = {name for name, _ in scrape(counting)}
    assert names >= set(triton_series.INFERENCE)
    assert metric(counting, "nv_inference_pending_request_count") == 0
    for reason in ("BACKEND", "OTHER"):  # of dit, only a dead process counts here; an alert relies on that
        assert metric(counting, "nv_inference_request_failure", model="dit", reason=reason) == 0


def test_the_log_has_a_line_a_request(counting: TritonServer) -> None:
    ids = {f"{ended}-0123456789abcdef": ended for ended in ("ok", "invalid", "cancelled", "deadline")}
    lines = [line for line in logged_requests(counting) if line["id"] in ids]
    assert len(lines) == len(ids)
    assert {line["id"]: line["outcome"] for line in lines} == ids
    (ok,) = [line for line in lines if line["outcome"] == "ok"]
    assert ok.keys() >= {"encode_ms", "queue_ms", "denoise_ms", "decode_ms", "total_ms"}


def test_prompts_are_in_the_log_only_where_that_is_switched_on(counting: TritonServer, server: TritonServer) -> None:
    values = SMALL | {"NUM_INFERENCE_STEPS": 1, "PROMPT": "a whispered wish", "NEGATIVE_PROMPT": "a whispered fear"}
    for asked in (counting, server):
        assert ending(asked, values, request_id="whispered") == "ok"
        too_long = values | {"PROMPT": "a whispered wish " * 2000}
        assert ending(asked, too_long, request_id="too long") == "INVALID_ARG"
        no_text = values | {"PROMPT": np.array([b"a whispered wish \xff"], np.object_)}
        assert ending(asked, no_text, request_id="no text") == "INVALID_ARG"
        # Triton writes what several processes say, each in its own time.
        wait_until(
            "they are in the log",
            lambda asked=asked: {line["id"] for line in logged_requests(asked)} >= {"whispered", "too long", "no text"},  # type: ignore[misc]
        )
    assert counting.log is not None
    assert server.log is not None
    said = [line for line in counting.log.read_text().splitlines() if "a whispered wish" in line]
    assert len(said) == 3
    assert "whispered" not in re.sub(r'"id\W+whispered', "", server.log.read_text())
