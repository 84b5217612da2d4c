"""An engine over worker processes: the same results as one process, and what happens when a worker dies or hangs."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import Ticket, conditioning, engine, request, run, tiny_sampler
from worker_tools import alive, gone, parallel_sampler

from ditpack.engine.job import Result
from ditpack.errors import Unavailable
from ditpack.models.families import UnusableError
from ditpack.parallel.group import CallFailed, WorkersLost
from ditpack.parallel.sampler import ParallelSampler
from ditpack.sampling.qwen_image import Conditioning

SILENCE_S = 3.0  # worker_timeout_s of these tests
MIX = [
    request(num_inference_steps=4),
    request(seed=2, width=96, num_inference_steps=6, true_cfg_scale=1.0),
    request(seed=3, height=160, num_inference_steps=5, prompt="a broccoli on the left"),
]
ENDLESS = request(seed=9, num_inference_steps=200)


@pytest.fixture(autouse=True, scope="module")
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of these tests alone; the workers' own must be gone at the end, and shared memory is not used."""
    directory = tmp_path_factory.mktemp("tmp")
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    shared_memory = set(os.listdir("/dev/shm"))
    yield
    tempfile.tempdir = before
    assert list(directory.iterdir()) == []
    left = set(os.listdir("/dev/shm")) - shared_memory
    assert not [name for name in left if name.startswith("torch_")], "as torch calls the memory of tensors it shares"


@pytest.fixture(scope="module")
def sampler(tiny_checkpoint: Path) -> Iterator[ParallelSampler]:
    """Shared; a test that breaks its workers waits until they are back. No process of it is left."""
    made = parallel_sampler(tiny_checkpoint, timeout_s=SILENCE_S)
    yield made
    pids = made.pids
    assert len(pids) == 2
    made.close()
    assert alive(pids) == []


class Open:
    """``sampler``, but closing an engine leaves it open."""

    def __init__(self, sampler: ParallelSampler) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def close(self) -> None:
        pass


def wait_until(holds: Callable[[], bool], timeout: float = 60.0) -> None:
    until = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)


def test_equals_one_process(sampler: ParallelSampler, tiny_checkpoint: Path) -> None:
    for ours, exact in zip(run(Open(sampler), MIX), run(tiny_sampler(tiny_checkpoint), MIX), strict=True):
        assert isinstance(ours, Result)
        assert isinstance(exact, Result)
        assert float((ours.latents - exact.latents).abs().max()) < 1e-4
        assert ours.info["pack"]["requests_max"] > 1


def test_the_clean_latents_can_be_looked_at(sampler: ParallelSampler, tiny_checkpoint: Path) -> None:
    previews = []
    for each in (sampler, tiny_sampler(tiny_checkpoint)):
        member: Any = each.begin(MIX[0], conditioning(MIX[0]))
        each.step(each.pack([member]))
        previews.append(each.preview(member)())
        assert each.eager_forwards > 0
    assert float((previews[0] - previews[1]).abs().max()) < 1e-4


def test_padding_is_what_makes_the_tokens_divisible(sampler: ParallelSampler) -> None:
    for prompt in ("a red apple", "a red apple!"):
        member = sampler.begin(even := request(prompt=prompt, true_cfg_scale=1.0), conditioning(even))
        assert sampler.pack([member]).pad_tokens == member.tokens % 2
    assert {len("a red apple") % 2, len("a red apple!") % 2} == {0, 1}


def test_members_are_forgotten_with_their_proxies(sampler: ParallelSampler) -> None:
    member = sampler.begin(MIX[0], conditioning(MIX[0]))
    key = member.key
    del member
    sampler.check_device()  # any call carries the word
    assert sampler._group is not None
    with pytest.raises(CallFailed, match=f"KeyError: {key}"):
        sampler._group.call("lay_out", [key])


def test_a_failed_call_costs_no_worker(sampler: ParallelSampler) -> None:
    pids = sampler.pids
    with pytest.raises(CallFailed, match="EMBEDS") as failed:
        sampler.begin(MIX[0], Conditioning(torch.zeros(3, 5), torch.zeros(3, 5)))
    assert "in begin" in failed.value.__notes__[0], "where it failed on the rank"
    assert isinstance(run(Open(sampler), MIX[:1])[0], Result)
    assert sampler.pids == pids


def interrupt(sampler: ParallelSampler, blow: Callable[[list[int]], None]) -> float:
    """Two requests in mid-flight meet ``blow``; the seconds until both have their answer, UNAVAILABLE.

    Then the engine serves again, on new workers; a request that comes in between is refused at once.
    """
    served = engine(Open(sampler))
    pids = sampler.pids
    tickets = [Ticket(ENDLESS), Ticket(request(seed=10, width=96, num_inference_steps=200))]
    for ticket in tickets:
        served.submit(ticket.job)
    wait_until(lambda: served.active_requests == 2)
    time.sleep(0.2)
    begun = time.monotonic()
    blow(pids)
    for ticket in tickets:
        outcome = ticket.outcome()
        assert isinstance(outcome, Unavailable), outcome
        assert "workers were lost" in str(outcome)
    seconds = time.monotonic() - begun
    assert not served.healthy
    with pytest.raises(Unavailable, match="workers were lost"):
        served.submit(Ticket(MIX[0]).job)
    assert gone(pids, 5), "the group is killed as a whole"
    wait_until(lambda: served.healthy)
    later = Ticket(MIX[0])
    served.submit(later.job)
    assert isinstance(later.outcome(), Result)
    assert all(len(ticket.outcomes) == 1 for ticket in tickets)
    served.close(10)
    return seconds


def test_a_worker_killed_in_mid_step(sampler: ParallelSampler) -> None:
    assert interrupt(sampler, lambda pids: os.kill(pids[1], signal.SIGKILL)) < 5


def test_a_worker_that_hangs(sampler: ParallelSampler) -> None:
    assert interrupt(sampler, lambda pids: os.kill(pids[1], signal.SIGSTOP)) < 2 * SILENCE_S + 5


def test_ranks_that_do_not_agree(sampler: ParallelSampler) -> None:
    """One rank lacks the pack that the other steps: it fails, and the other waits for it in an all-to-all."""
    group = sampler._group
    assert group is not None
    member = sampler.begin(MIX[0], conditioning(MIX[0]))
    group._channels[1].send_bytes(pickle.dumps((0, "check_device", (), [member.key])))
    with pytest.raises(CallFailed, match="KeyError"):
        sampler.pack([member])
    with pytest.raises(WorkersLost):
        group.call("step")
    wait_until(lambda: sampler.ready)


class Mute:
    """In place of a worker's channel: what is said to it is not heard."""

    def send_bytes(self, _message: bytes) -> None:
        pass


def test_a_worker_that_lives_but_does_not_answer(sampler: ParallelSampler) -> None:
    group: Any = sampler._group
    channel, group._channels[1] = group._channels[1], Mute()
    with pytest.raises(WorkersLost, match=r"no answer to check_device from rank 1 .cpu. within 0\.5 s"):
        group.call("check_device", timeout_s=0.5)
    group._channels[1] = channel
    wait_until(lambda: sampler.ready)


def test_refusing_for_good(tiny_checkpoint: Path) -> None:
    """An idle worker hangs. Beside the shared group, which must not mind: two groups at once do not meet."""
    sampler = parallel_sampler(tiny_checkpoint, timeout_s=3, restart=False, parallel="rows")
    served = engine(sampler)
    first = Ticket(MIX[0])
    served.submit(first.job)
    assert isinstance(first.outcome(), Result)
    pids = sampler.pids
    os.kill(pids[0], signal.SIGSTOP)
    wait_until(lambda: not served.healthy, 8)
    with pytest.raises(Unavailable, match=r"nothing heard of rank 0 \(cpu\) for 3 s"):
        served.submit(Ticket(MIX[0]).job)
    wait_until(lambda: sampler.pids == [])
    with pytest.raises(Unavailable, match="has to be loaded again"):
        served.submit(Ticket(MIX[0]).job)
    served.close(10)
    assert gone(pids, 5)


@pytest.mark.parametrize(
    ("changes", "setting", "reason"),
    [
        ({"devices": ("cuda:7", "cuda:9")}, "devices", "cuda:[79]: PyTorch sees . GPUs here"),
        ({"attention": "flash3"}, "attention", "flash3 runs on cuda"),
    ],
)
def test_what_a_worker_cannot_serve_is_told(
    changes: dict[str, Any], setting: str, reason: str, tiny_checkpoint: Path
) -> None:
    if torch.cuda.device_count() > 7:
        pytest.skip("all these devices are here")
    with pytest.raises(UnusableError, match=reason) as raised:
        parallel_sampler(tiny_checkpoint, **changes)
    assert raised.value.setting == setting


def test_closed_while_workers_restart(tiny_checkpoint: Path) -> None:
    sampler = parallel_sampler(tiny_checkpoint)
    pids = sampler.pids
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: sampler._starting is not None)
    assert sampler._starting is not None
    pids += sampler._starting.pids
    begun = time.monotonic()
    sampler.close()
    assert time.monotonic() - begun < 5
    assert alive(pids) == []
    assert not sampler.ready


PARENT = """
import sys, threading
sys.path[:0] = {path!r}
from pathlib import Path
from worker_tools import parallel_sampler
sampler = parallel_sampler(Path({checkpoint!r}))
print(*sampler.pids, flush=True)
members = [sampler.begin(*sampler.example(256)) for _ in range(4)]
while True:
    sampler.step(sampler.pack(members)) if members[0].steps_left > 1 else threading.Event().wait()
"""


def test_no_worker_outlives_its_parent(tiny_checkpoint: Path) -> None:
    """SIGKILL gives the parent no chance to clean up, and a stopped worker none to notice."""
    path = [str(Path(__file__).parent)]
    code = PARENT.format(path=path, checkpoint=str(tiny_checkpoint))
    environment = os.environ | {"TMPDIR": str(tempfile.gettempdir())}
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment)
    assert parent.stdout is not None
    assert parent.stderr is not None
    pids = list(map(int, parent.stdout.readline().split()))
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGSTOP)
    parent.kill()
    parent.wait()
    assert gone(pids, 5)
    assert parent.stderr.read() == "", "no noise"
    parent.stdout.close()
    parent.stderr.close()


def test_threads_end(sampler: ParallelSampler) -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("ditpack-workers") == 1
    assert sum(name.startswith("ditpack-rank") for name in names) == 2
