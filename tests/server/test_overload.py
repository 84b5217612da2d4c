"""A server with room for very little: what is too much is refused at once, and what matters more goes first."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
from server_tools import (
    TIMEOUT,
    Caller,
    code,
    edited_repository,
    load,
    metric,
    parameter,
    serving,
    tensors,
    wait_until,
)
from stages import dit_inputs
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer

pytestmark = pytest.mark.server

QUEUE = 4
STORM = 8.0  # seconds; the crash came within them in most runs
SOON = 5.0  # seconds; a refusal needs no work, a blocker would take far longer
SMALL = {"PROMPT": "a red kite", "WIDTH": 32, "HEIGHT": 32, "NUM_INFERENCE_STEPS": 2, "SEED": 1}
# Long enough that the answers of two come apart, though the decoder takes those that arrive together in one batch.
MEDIUM = {**SMALL, "NUM_INFERENCE_STEPS": 100}
LARGE = {"PROMPT": "a red kite", "WIDTH": 768, "HEIGHT": 768, "NUM_INFERENCE_STEPS": 200, "SEED": 1}
SIZES = {"small": SMALL, "medium": MEDIUM, "large": LARGE}


@pytest.fixture(scope="module")
def narrow(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One request at a time in the engine, one waiting, one in the call that blocks, QUEUE in Triton's queue."""
    directory = tmp_path_factory.mktemp("narrow")
    edits = [parameter("waiting_room", "1"), parameter("token_budget", "64")]
    edits.append((r"max_queue_size: \d+", f"max_queue_size: {QUEUE}"))
    repository = edited_repository(directory / "model_repository", {"dit": edits})
    with serving(tiny_checkpoint, directory / "tritonserver.log", repository) as started:
        yield started


class Calls:
    """Asynchronous gRPC calls and the order in which they were answered."""

    def __init__(self, server: TritonServer, tensors_of: dict[str, list[Any]]) -> None:
        self._server = server
        self._client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        self._tensors_of = tensors_of
        self._calls: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}  # name → result or error, in the order of arrival

    def send(self, name: str, size: str, model: str = "dit", priority: int = 0) -> None:
        def answered(result: Any, error: Any) -> None:
            self.answers[name] = error or result

        self._calls[name] = self._client.async_infer(
            model, self._tensors_of[f"{model} {size}"], answered, request_id=name, priority=priority
        )

    def cancel(self, *names: str) -> None:
        for name in names:
            self._calls[name].cancel()

    def wait_for(self, *names: str) -> None:
        wait_until(f"answers for {names}", lambda: all(name in self.answers for name in names))

    def queued(self) -> int:
        return int(metric(self._server, "nv_inference_pending_request_count", model="dit"))

    def block(self) -> None:
        """Fill the engine, its waiting room and the call that waits for it: from here on Triton's queue fills."""
        self.send("running", "large")
        wait_until("one is running", lambda: load(self._server) == (1, 0))
        self.send("waiting", "large")
        wait_until("one is waiting", lambda: load(self._server) == (1, 1))
        self.send("blocking", "large")
        wait_steadily("one blocks the door", lambda: self.queued() == 0)

    def settle(self) -> None:
        """Wait until all is done. A client has its answer when it cancels, but the call may still be on its way."""
        wait_steadily("an idle server", lambda: load(self._server) == (0, 0) and self.queued() == 0)

    def end(self) -> None:
        self.cancel(*(name for name in self._calls if name not in self.answers))
        self.settle()
        self._client.close()


def wait_steadily(what: str, holds: Callable[[], bool], seconds: float = 0.5) -> None:
    """Until ``holds`` has held for ``seconds``: for what cannot be seen directly."""
    deadline = time.monotonic() + TIMEOUT
    since = time.monotonic()
    while time.monotonic() - since < seconds:
        assert time.monotonic() < deadline, f"not within {TIMEOUT:g} s: {what}"
        if not holds():
            since = time.monotonic()
        time.sleep(0.02)


@pytest.fixture
def calls(narrow: TritonServer) -> Iterator[Calls]:
    caller = Caller(narrow, "grpc")
    made = {f"qwen_image {size}": tensors(tritonclient.grpc, values) for size, values in SIZES.items()}
    for size, values in SIZES.items():
        made[f"dit {size}"] = tensors(tritonclient.grpc, dit_inputs(caller, values).values())
    caller.close()
    opened = Calls(narrow, made)
    yield opened
    opened.end()


def test_a_full_server_refuses_at_once_and_recovers(narrow: TritonServer, calls: Calls) -> None:
    calls.block()
    for index in range(QUEUE):
        calls.send(f"queued {index}", "large")
        wait_until("it is queued", lambda expected=index + 1: calls.queued() == expected)  # type: ignore[misc]

    # One too many, by every way in.
    for protocol in ("http", "grpc"):
        caller = Caller(narrow, protocol)
        direct = dit_inputs(caller, SMALL).values()
        for model, values in (("dit", direct), ("qwen_image", SMALL)):
            started = time.monotonic()
            with pytest.raises(InferenceServerException) as caught:
                caller.infer(values, model=model)
            assert time.monotonic() - started < SOON
            assert code(caught.value) == "UNAVAILABLE"
            assert "Exceeds maximum queue size" in str(caught.value)
        caller.close()
    assert not calls.answers, "those that were taken are still being served"

    # Room again: the first two end, everybody moves up, and a new request gets its picture.
    calls.cancel("running", "waiting", "blocking", *(f"queued {index}" for index in range(QUEUE)))
    calls.settle()
    for protocol in ("http", "grpc"):
        caller = Caller(narrow, protocol)
        assert caller.infer(SMALL)["SEED_USED"].item() == 1
        caller.close()


def test_those_in_the_queue_are_served_in_the_end(narrow: TritonServer, calls: Calls) -> None:
    """Back-pressure loses nobody: whoever was queued while the engine was full gets an answer."""
    calls.block()
    names = [f"queued {index}" for index in range(QUEUE)]
    for name in names:
        calls.send(name, "small", "qwen_image")
    wait_until("all are queued", lambda: calls.queued() == QUEUE)
    calls.cancel("running", "waiting", "blocking")
    calls.wait_for(*names)
    assert not [name for name in names if isinstance(calls.answers[name], Exception)]


@pytest.mark.parametrize("model", ["dit", "qwen_image"])
def test_a_higher_priority_overtakes(calls: Calls, model: str) -> None:
    calls.block()
    for index, (name, priority) in enumerate((("low 1", 3), ("low 2", 3), ("usual", 0), ("high", 1))):
        calls.send(name, "medium", model, priority)
        wait_until("it is queued", lambda expected=index + 1: calls.queued() == expected)  # type: ignore[misc]
    calls.cancel("running", "waiting", "blocking")
    calls.wait_for("low 1", "low 2", "usual", "high")
    order = [name for name in calls.answers if name in ("low 1", "low 2", "usual", "high")]
    assert order == ["high", "usual", "low 1", "low 2"]


def test_a_higher_priority_overtakes_those_that_came_before_it(calls: Calls) -> None:
    """Triton hands over one request at a time: had it handed over all that waited, "high" would come last."""
    calls.block()
    for index, name in enumerate(("low 1", "low 2", "low 3")):
        calls.send(name, "medium", priority=3)
        wait_until("it is queued", lambda expected=index + 1: calls.queued() == expected)  # type: ignore[misc]
    calls.cancel("running")  # everybody moves up by one
    wait_until("low 1 has been handed over", lambda: calls.queued() == 2)
    calls.send("high", "medium", priority=1)
    wait_until("it is queued", lambda: calls.queued() == 3)
    calls.cancel("waiting", "blocking")
    calls.wait_for("low 1", "low 2", "low 3", "high")
    order = [name for name in calls.answers if name.startswith(("low", "high"))]
    assert order == ["low 1", "high", "low 2", "low 3"]


def test_cancels_at_every_stage_leave_the_server_alive(narrow: TritonServer, calls: Calls) -> None:
    """In the queue, at the door, waiting, in the engine: 2.51 crashed when two threads asked for cancels."""
    chance = random.Random(1)
    sent = 0
    until = time.monotonic() + STORM
    while time.monotonic() < until:
        names = [f"call {sent + index}" for index in range(chance.randint(1, 3 + QUEUE))]
        sent += len(names)
        for name in names:
            calls.send(name, "large")
            time.sleep(chance.choice([0, 0, 0.01, 0.05]))
        chance.shuffle(names)
        for name in names:
            calls.cancel(name)
            time.sleep(chance.choice([0, 0, 0.005, 0.02]))
        wait_until("an idle engine", lambda: load(narrow) == (0, 0))
    calls.wait_for(*(f"call {index}" for index in range(sent)))
    assert len(calls.answers) == sent
    assert {code(answer) for answer in calls.answers.values()} <= {"CANCELLED", "UNAVAILABLE"}
    calls.settle()
    caller = Caller(narrow, "grpc")
    assert caller.infer(SMALL)["SEED_USED"].item() == 1
    caller.close()
