"""What an encoder has answered before: a prompt or a photo that comes again is not encoded again.

Triton's own response cache (2.51) keeps an error as if it were an answer, and fails every later request with it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from ditpack.tritonserver.metrics import CacheMetrics
from ditpack.tritonserver.tensors import Array

Item = TypeVar("Item")


class AnswerCache:
    """The latest answers of a pure function, ``max_bytes`` of arrays at most; what went unused for longest goes first.

    For one thread: Triton calls an instance's ``execute`` one at a time. The same array is handed out again and again,
    as it was computed, bit for bit; so it is read-only.
    """

    def __init__(self, max_bytes: int, metrics: CacheMetrics) -> None:
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._kept: OrderedDict[bytes, Array] = OrderedDict()  # by digest, the latest used last
        self._bytes = 0

    def answer(
        self,
        items: Sequence[Item],
        inputs: Callable[[Item], Iterable[Array]],
        compute: Callable[[list[Item]], Sequence[Array]],
    ) -> list[Array]:
        """Each item's answer, in the order of ``items``.

        ``inputs``: the arrays that an item's answer depends on, and nothing else. ``compute`` is called once at most,
        with one item for each of the inputs that no answer is kept for, and returns an array for each, with memory of
        its own. What it raises is raised, and then nothing is kept or counted.
        """
        keys = [_digest(inputs(item)) for item in items]
        answers: dict[bytes, Array] = {}
        missing: dict[bytes, Item] = {}
        for key, item in zip(keys, items, strict=True):
            if key in self._kept:
                self._kept.move_to_end(key)
                answers[key] = self._kept[key]
            else:
                missing.setdefault(key, item)
        if missing:
            made = dict(zip(missing, compute(list(missing.values())), strict=True))
            for key, answer in made.items():
                answer.flags.writeable = False
                self._keep(key, answer)
            answers |= made
        self._metrics.answered(hits=len(items) - len(missing), misses=len(missing))
        return [answers[key] for key in keys]

    def _keep(self, key: bytes, answer: Array) -> None:
        if answer.nbytes > self._max_bytes or not np.isfinite(answer).all():  # dit refuses what is not: a failure too
            return
        self._kept[key] = answer
        self._bytes += answer.nbytes
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes


def _digest(arrays: Iterable[Array]) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())  # says how many bytes follow: no two lists read alike
        digest.update(array.tobytes())
    return digest.digest()
