"""A server with room for very little: what is too much is refused at once, and what matters more goes first."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tritonclient.grpc
from server_tools import NARROW_QUEUE, TIMEOUT, Caller, code, load, tensors, wait_until
from stages import dit_inputs
from tritonclient.utils import InferenceServerException

from ditpack.tritonserver.launch import TritonServer

pytestmark = pytest.mark.server

STORM = 8.0  # seconds; the crash came within them in most runs
SOON = 5.0  # seconds; a refusal needs no work, a blocker would take far longer
SMALL = {"PROMPT": "a red kite", "WIDTH": 32, "HEIGHT": 32, "NUM_INFERENCE_STEPS": 2, "SEED": 1}
MEDIUM = SMALL | {"WIDTH": 64, "HEIGHT": 64, "NUM_INFERENCE_STEPS": 50}  # two of them exceed the budget
LARGE = {"PROMPT": "a red kite", "WIDTH": 768, "HEIGHT": 768, "NUM_INFERENCE_STEPS": 200, "SEED": 1}
KINDS = {
    "large": LARGE,
    "large and urgent": LARGE | {"PRIORITY": 1},
    "low": MEDIUM | {"PRIORITY": 3},
    "usual": MEDIUM,
    "urgent": MEDIUM | {"PRIORITY": 1},
}


class Calls:
    """Asynchronous gRPC calls and the order in which they were answered."""

    def __init__(self, server: TritonServer, tensors_of: dict[str, list[Any]]) -> None:
        self.server = server
        self._client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        self._tensors_of = tensors_of
        self._calls: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}  # name → result or error, in the order of arrival

    def send(self, name: str, values: str, model: str = "dit", timeout_us: int = 0) -> None:
        def answered(result: Any, error: Any) -> None:
            self.answers[name] = error or result

        self._calls[name] = self._client.async_infer(
            model, self._tensors_of[f"{model} {values}"], answered, request_id=name, timeout=timeout_us
        )

    def cancel(self, *names: str) -> None:
        for name in names:
            self._calls[name].cancel()

    def wait_for(self, *names: str) -> None:
        wait_until(f"answers for {names}", lambda: all(name in self.answers for name in names))

    def block(self, queue: int = NARROW_QUEUE) -> None:
        """Occupy the engine and let ``queue`` wait."""
        self.send("running", "large")
        wait_until("one is running", lambda: load(self.server) == (1, 0))
        for index in range(queue):
            self.wait_behind(f"queued {index}", "large", index + 1)

    def wait_behind(self, name: str, values: str, waiting: int, model: str = "dit") -> None:
        """Send one that has to wait; ``waiting`` do then."""
        self.send(name, values, model)
        wait_until("it waits", lambda: load(self.server) == (1, waiting))

    def settle(self) -> None:
        """Wait until all is done. A client has its answer when it cancels, but the call may still be on its way."""
        wait_steadily("an idle server", lambda: load(self.server) == (0, 0))

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
    made = {f"qwen_image {kind}": tensors(tritonclient.grpc, values) for kind, values in KINDS.items()}
    for kind, values in KINDS.items():
        made[f"dit {kind}"] = tensors(tritonclient.grpc, dit_inputs(caller, values).values())
    caller.close()
    opened = Calls(narrow, made)
    yield opened
    opened.end()


def test_a_full_server_refuses_at_once_and_recovers(narrow: TritonServer, calls: Calls) -> None:
    calls.block()
    for protocol in ("http", "grpc"):
        caller = Caller(narrow, protocol)
        direct = dit_inputs(caller, SMALL).values()
        for model, values in (("dit", direct), ("qwen_image", SMALL)):
            started = time.monotonic()
            with pytest.raises(InferenceServerException) as caught:
                caller.infer(values, model=model)
            assert time.monotonic() - started < SOON
            assert code(caught.value) == "UNAVAILABLE"
            assert f"full: {NARROW_QUEUE} requests wait, max_queue_size is {NARROW_QUEUE}" in str(caught.value)
        caller.close()
    assert not calls.answers, "those that were taken are still being served"

    # Room again: a new request gets its picture.
    calls.cancel("running", *(f"queued {index}" for index in range(NARROW_QUEUE)))
    calls.settle()
    for protocol in ("http", "grpc"):
        caller = Caller(narrow, protocol)
        assert caller.infer(SMALL)["SEED_USED"].item() == 1
        caller.close()


def test_those_in_the_queue_are_served_in_the_end(calls: Calls) -> None:
    """Back-pressure loses nobody: whoever was queued while the engine was full gets an answer."""
    calls.block(queue=0)
    names = [f"queued {index}" for index in range(NARROW_QUEUE)]
    for name in names:
        calls.send(name, "usual", "qwen_image")
    calls.wait_for(*names)
    assert not [name for name in names if isinstance(calls.answers[name], Exception)]


def test_who_may_not_wait_is_told_in_time(calls: Calls) -> None:
    """Triton's request parameter ``timeout``, through the ensemble; the engine is busy for far longer."""
    calls.block(queue=0)
    calls.send("impatient", "low", "qwen_image", timeout_us=200_000)
    calls.wait_for("impatient")
    error = calls.answers["impatient"]
    assert code(error) == "UNAVAILABLE"
    assert re.search(r"timeout: no step taken in \d\.\d s, 0\.2 s are allowed", str(error))
    assert "running" not in calls.answers


@pytest.mark.parametrize("model", ["dit", "qwen_image"])
def test_a_higher_priority_overtakes(calls: Calls, model: str) -> None:
    """Those that wait, and one that has begun and has more left to do."""
    calls.send("running", "large and urgent")
    wait_until("it runs", lambda: load(calls.server) == (1, 0))
    calls.wait_behind("low", "low", 1, model)
    calls.wait_behind("usual", "usual", 2, model)
    calls.send("urgent", "urgent", model)
    calls.wait_for("urgent")
    assert [*calls.answers] == ["urgent"]
    calls.cancel("running")
    calls.wait_for("low", "usual")
    assert [*calls.answers] == ["urgent", "running", "usual", "low"]


def test_cancels_at_every_stage_leave_the_server_alive(narrow: TritonServer, calls: Calls) -> None:
    """On their way, waiting, taking steps: 2.51 crashed when two threads asked for cancels."""
    chance = random.Random(1)
    sent = 0
    until = time.monotonic() + STORM
    while time.monotonic() < until:
        names = [f"call {sent + index}" for index in range(chance.randint(1, 3 + NARROW_QUEUE))]
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
