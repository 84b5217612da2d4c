"""The engines' sockets: cancel, watch, status and drain over them, whatever comes in and whoever goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_tools import TIMEOUT, Hooked, Ticket, engine, request, tiny_sampler

from ditpack.engine import channel
from ditpack.engine.channel import EngineChannel
from ditpack.engine.engine import Engine
from ditpack.engine.job import Result
from ditpack.errors import Cancelled, Unavailable
from ditpack.sampling.qwen_image import QwenImageSampler

LONG = 400  # steps; seconds


@pytest.fixture(scope="module")
def sampler(tiny_checkpoint: Path) -> QwenImageSampler:
    return tiny_sampler(tiny_checkpoint)


@contextlib.contextmanager
def listening(
    sampler: Any, directory: Path, name: str = "dit_0_0", picture: Callable[[Any], str] = lambda latents: "picture"
) -> Iterator[Engine]:
    served = engine(sampler)
    opened = EngineChannel(served, directory, name, picture)
    try:
        yield served
    finally:
        served.close(TIMEOUT)
        opened.close()
        assert not opened.path.exists()


def started(served: Engine, steps: int = LONG, seed: int = 1) -> Ticket:
    ticket = Ticket(request(seed=seed, num_inference_steps=steps))
    served.submit(ticket.job)
    return ticket


def watched(path: Path, request_id: str, wait_s: float = TIMEOUT, every: int = 0) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [line async for line in channel.watch(path, request_id, wait_s, every)]

    return asyncio.run(collect())


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def watchers() -> int:
    """Threads that serve a connection."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_status_and_cancel(sampler: QwenImageSampler, tmp_path: Path) -> None:
    with listening(sampler, tmp_path) as served:
        ticket = started(served)
        assert eventually(lambda: channel.status(tmp_path)[0]["active"] == 1)
        assert channel.status(tmp_path) == [
            {"name": "dit_0_0", "healthy": True, "refusal": None, "active": 1, "waiting": 0}
        ]
        assert not channel.cancel(tmp_path, "somebody else")
        assert channel.cancel(tmp_path, ticket.job.request_id)
        outcome = ticket.outcome()
        assert isinstance(outcome, Cancelled)
        assert "cancelled by its id after" in str(outcome)
        assert eventually(lambda: channel.status(tmp_path)[0]["active"] == 0)


def test_a_watcher_sees_every_state_in_order_and_the_end(sampler: QwenImageSampler, tmp_path: Path) -> None:
    with listening(sampler, tmp_path) as served:
        ticket = started(served, steps=10)
        lines = watched(tmp_path / "dit_0_0.sock", ticket.job.request_id, every=3)
        assert isinstance(ticket.outcome(), Result)
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert all(line["steps"] == 10 for line in lines)
    previews = [line["preview_step"] for line in lines if "preview" in line]
    assert previews
    assert set(previews) <= {3, 6, 9}
    assert len(set(previews)) == len(previews)


def test_a_preview_that_fails_costs_no_progress(sampler: QwenImageSampler, tmp_path: Path) -> None:
    def broken(latents: Any) -> str:
        raise RuntimeError("no decoder")

    with listening(sampler, tmp_path, picture=broken) as served:
        ticket = started(served, steps=10)
        lines = watched(tmp_path / "dit_0_0.sock", ticket.job.request_id, every=1)
        assert isinstance(ticket.outcome(), Result)
    assert len(lines) > 3
    assert not any("preview" in line for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"nonsense\n",
        b"[]\n",
        b"7\n",
        b"null\n",
        b"{}\n",
        b'{"do": "explode"}\n',
        b'{"do": "cancel"}\n',
        b'{"do": "watch", "id": "x", "wait_s": "soon", "preview_every": null}\n',
        b'{"do": "watch", "id": "x", "wait_s": 1, "preview_every": null}\n',
        b"\xff\xfe\n",
        b"x" * 100_000,
    ],
)
def test_nonsense_is_hung_up_on_and_harms_nobody(
    sampler: QwenImageSampler, tmp_path: Path, line: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with listening(sampler, tmp_path):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(os.path.relpath(tmp_path / "dit_0_0.sock"))
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
        assert channel.status(tmp_path)[0]["healthy"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("request_id", ["seed-1", "never comes"])
def test_a_reader_that_vanishes_leaves_no_thread(sampler: QwenImageSampler, tmp_path: Path, request_id: str) -> None:
    with listening(sampler, tmp_path) as served:
        before = watchers()
        ticket = started(served)
        for _ in range(5):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(os.path.relpath(tmp_path / "dit_0_0.sock"))
            command = {"do": "watch", "id": request_id, "wait_s": 3600, "preview_every": 0}
            connection.sendall(json.dumps(command).encode() + b"\n")
            if request_id == "seed-1":
                assert connection.recv(10)
            connection.close()
        assert eventually(lambda: watchers() <= before)
        assert not ticket.outcomes, "the request itself goes on"
        served.cancel(ticket.job.request_id)


def test_many_watchers_do_not_keep_others_from_asking(
    sampler: QwenImageSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_WATCHERS", 2)
    with listening(sampler, tmp_path), contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(os.path.relpath(tmp_path / "dit_0_0.sock"))
            connection.sendall(b'{"do": "watch", "id": "x", "wait_s": 60, "preview_every": 0}\n')
        assert channel.status(tmp_path)[0]["healthy"]


def test_one_that_replaces_another_is_not_taken_away_with_it(
    sampler: QwenImageSampler, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Triton loads a model again before it ends the old one; both have the same name."""
    old_engine, new_engine = engine(sampler), engine(tiny_sampler(tiny_checkpoint))
    old = EngineChannel(old_engine, tmp_path, "dit_0_0", lambda latents: "picture")
    new = EngineChannel(new_engine, tmp_path, "dit_0_0", lambda latents: "picture")
    old_engine.close(TIMEOUT)
    old.close()
    assert [(each["name"], each["healthy"]) for each in channel.status(tmp_path)] == [("dit_0_0", True)]
    new_engine.close(TIMEOUT)
    new.close()
    assert not new.path.exists()


def test_two_engines_in_one_directory(sampler: QwenImageSampler, tiny_checkpoint: Path, tmp_path: Path) -> None:
    second = tiny_sampler(tiny_checkpoint)  # a sampler is one engine's
    with listening(sampler, tmp_path, "dit_0_0") as one, listening(second, tmp_path, "dit_0_1") as two:
        tickets = [started(one, seed=1), started(two, seed=2)]
        assert [each["name"] for each in channel.status(tmp_path)] == ["dit_0_0", "dit_0_1"]
        assert channel.cancel(tmp_path, "seed-2")
        assert isinstance(tickets[1].outcome(), Cancelled)
        assert not tickets[0].outcomes
        assert channel.cancel(tmp_path, "seed-1")
        assert isinstance(tickets[0].outcome(), Cancelled)
        assert channel.drain(tmp_path, TIMEOUT)
        assert not any(each["healthy"] for each in channel.status(tmp_path))


KILLED = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("there", flush=True)
time.sleep(60)
"""


def test_a_socket_of_the_dead_is_not_healthy_and_is_taken_over(sampler: QwenImageSampler, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, "dit_0_0.sock"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert channel.sockets(tmp_path), "a killed process leaves its file behind"
    (dead,) = channel.status(tmp_path)
    assert (dead["healthy"], dead["refusal"]) == (False, "its process does not answer")
    assert not channel.cancel(tmp_path, "x")
    assert not channel.drain(tmp_path, 1)
    assert watched(tmp_path / "dit_0_0.sock", "x") == []
    with listening(sampler, tmp_path):
        assert channel.status(tmp_path)[0]["healthy"]


def test_an_engine_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """A process that hangs still accepts connections: the kernel does it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "dit_0_0.sock"))
        listener.listen()
        began = time.monotonic()
        assert channel.ask(tmp_path / "dit_0_0.sock", {"do": "status"}, timeout=0.2) is None
        assert time.monotonic() - began < 5


def test_a_truncated_answer_is_none(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "dit_0_0.sock"))
        listener.listen()

        def half() -> None:
            connection, _ = listener.accept()
            connection.recv(100)
            connection.sendall(b'{"health')
            connection.close()

        thread = threading.Thread(target=half)
        thread.start()
        assert channel.ask(tmp_path / "dit_0_0.sock", {"do": "status"}) is None
        thread.join(5)


def test_a_directory_may_be_deep(sampler: QwenImageSampler, tmp_path: Path) -> None:
    """A Unix socket's address has 107 bytes."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    with listening(sampler, deep) as served:
        assert channel.status(deep)[0]["healthy"]
        ticket = started(served, steps=5)
        watched(deep / "dit_0_0.sock", ticket.job.request_id)
        assert isinstance(ticket.outcome(), Result)


def test_only_this_user_may_enter(sampler: QwenImageSampler, tmp_path: Path) -> None:
    with listening(sampler, tmp_path / "run"):
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert not (tmp_path / "run").exists(), "the last one takes the directory away"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    served = engine(sampler)
    with pytest.raises(PermissionError, match="must belong to this user"):
        EngineChannel(served, tmp_path / "open", "dit_0_0", str)
    served.close(TIMEOUT)


class TestDrain:
    def test_what_was_accepted_before_is_finished_though_it_comes_later(
        self, sampler: QwenImageSampler, tmp_path: Path
    ) -> None:
        """It was in the text encoder, or in Triton's queue, when the order to drain came."""
        with listening(sampler, tmp_path) as served:
            first = started(served, steps=8)
            accepted = Ticket(request(seed=2, accepted_ns=time.monotonic_ns()))
            results: list[bool] = []
            thread = threading.Thread(target=lambda: results.append(channel.drain(tmp_path, TIMEOUT)))
            thread.start()
            assert eventually(lambda: served._closing_ns is not None)
            served.submit(accepted.job)
            with pytest.raises(Unavailable, match="shutting down"):
                served.submit(Ticket(request(seed=3, accepted_ns=time.monotonic_ns())).job)
            thread.join(TIMEOUT)
            assert results == [True]
            assert isinstance(first.outcome(), Result)
            assert isinstance(accepted.outcome(), Result)
            with pytest.raises(Unavailable, match="shutting down"):
                served.submit(Ticket(request(seed=4, accepted_ns=0)).job)

    def test_it_ends_in_time(self, sampler: QwenImageSampler, tmp_path: Path) -> None:
        gate = threading.Event()
        with listening(Hooked(sampler, step=lambda _: gate.wait(TIMEOUT)), tmp_path) as served:
            ticket = started(served, steps=2)
            began = time.monotonic()
            assert not channel.drain(tmp_path, 0.3)
            assert time.monotonic() - began < 5
            gate.set()
            assert isinstance(ticket.outcome(), Result)

    def test_a_dead_engine_is_drained_at_once(self, sampler: QwenImageSampler, tmp_path: Path) -> None:
        def die(pack: Any) -> None:
            raise SystemExit

        with listening(Hooked(sampler, step=die), tmp_path) as served:
            assert isinstance(started(served).outcome(), Unavailable)
            assert channel.drain(tmp_path, TIMEOUT)
            (status,) = channel.status(tmp_path)
            assert not status["healthy"]
            assert "the engine stopped (SystemExit)" in status["refusal"]
