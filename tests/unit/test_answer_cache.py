"""Encoders' answers: kept within the bytes allowed, given again bit for bit, computed once a batch; failures never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_pb_utils import MetricFamily

from ditpack.tritonserver.answer_cache import AnswerCache
from ditpack.tritonserver.metrics import CacheMetrics
from ditpack.tritonserver.tensors import Array

ANSWER_BYTES = 40


def item(*values: int, dtype: Any = np.int64) -> Array:
    return np.array(values, dtype)


class Encoder:
    """Answers with 40 bytes that differ at each computation, and counts the items of each call."""

    def __init__(self, max_bytes: int = 2**20) -> None:
        self.cache = AnswerCache(max_bytes, CacheMetrics("encoder"))
        self.calls: list[int] = []
        self.failure: Exception | None = None

    def encode(self, *items: Array) -> list[Array]:
        return self.cache.answer(items, lambda one: [one], self._compute)

    def _compute(self, items: Sequence[Array]) -> list[Array]:
        self.calls.append(len(items))
        if self.failure is not None:
            raise self.failure
        return [np.full(ANSWER_BYTES // 4, 100 * len(self.calls) + index, np.float32) for index in range(len(items))]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    MetricFamily.series.clear()


def counted() -> tuple[float, float]:
    """Hits and misses."""
    label = (("model", "encoder"),)
    hits, misses = (MetricFamily.series[f"ditpack_cache_{name}_total"][label] for name in ("hits", "misses"))
    return hits, misses


def test_an_answer_is_given_again_bit_for_bit() -> None:
    encoder = Encoder()
    assert counted() == (0, 0)
    (first,) = encoder.encode(item(1, 2))
    (again,) = encoder.encode(item(1, 2))
    assert encoder.calls == [1]
    assert again.tobytes() == first.tobytes()
    assert counted() == (1, 1)


def test_only_what_is_new_is_computed_and_the_order_is_kept() -> None:
    encoder = Encoder()
    (known,) = encoder.encode(item(1))
    answers = encoder.encode(item(2), item(1), item(3))
    assert encoder.calls == [1, 2]
    assert [answer[0] for answer in answers] == [200, known[0], 201]
    assert counted() == (1, 3)


@pytest.mark.parametrize("max_bytes", [0, 2**20])
def test_equals_of_one_batch_are_computed_once(max_bytes: int) -> None:
    encoder = Encoder(max_bytes)
    answers = encoder.encode(item(1), item(2), item(1), item(1))
    assert encoder.calls == [2]
    assert [answer[0] for answer in answers] == [100, 101, 100, 100]
    assert counted() == (2, 2)


def test_nothing_is_kept_where_nothing_may_be() -> None:
    encoder = Encoder(max_bytes=0)
    encoder.encode(item(1))
    encoder.encode(item(1))
    assert encoder.calls == [1, 1]
    assert counted() == (0, 2)


def test_what_went_unused_for_longest_goes_first() -> None:
    encoder = Encoder(max_bytes=2 * ANSWER_BYTES)
    for value in (1, 2, 1, 3):  # 3 pushes 2 out, for 1 was used since
        encoder.encode(item(value))
    encoder.encode(item(1), item(3))
    assert encoder.calls == [1, 1, 1]
    encoder.encode(item(2))
    assert encoder.calls == [1, 1, 1, 1]


def test_the_bytes_are_a_bound() -> None:
    encoder = Encoder(max_bytes=3 * ANSWER_BYTES + 39)
    for value in range(10):
        encoder.encode(item(value), item(value + 100))
    encoder.calls.clear()
    for value in (9, 109, 108):  # the three that fit
        encoder.encode(item(value))
    assert encoder.calls == []
    encoder.encode(item(8))
    assert encoder.calls == [1]


def test_one_answer_too_large_pushes_nothing_out() -> None:
    encoder = Encoder(max_bytes=ANSWER_BYTES)
    encoder.encode(item(1))
    large = encoder.cache.answer([item(2)], lambda one: [one], lambda _: [np.zeros(ANSWER_BYTES, np.float32)])
    assert large[0].nbytes == 4 * ANSWER_BYTES
    encoder.encode(item(1))
    assert encoder.calls == [1]


def test_a_failure_is_neither_kept_nor_counted() -> None:
    encoder = Encoder()
    encoder.encode(item(1))
    encoder.failure = MemoryError("CUDA out of memory")
    with pytest.raises(MemoryError):
        encoder.encode(item(1), item(2))
    assert counted() == (0, 1)
    encoder.failure = None
    encoder.encode(item(1), item(2))
    assert encoder.calls == [1, 1, 1], "2 alone is computed again"


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_an_answer_that_dit_will_refuse_is_not_kept(broken: float) -> None:
    encoder = Encoder()
    bad = np.array([1, broken], np.float32)
    assert encoder.cache.answer([item(1)], lambda one: [one], lambda _: [bad])[0] is bad
    assert encoder.encode(item(1))[0][0] == 100


def test_too_few_answers_are_an_error_and_not_kept() -> None:
    """They would be those of other items, for all that can be known."""
    encoder = Encoder()
    with pytest.raises(ValueError, match="shorter"):
        encoder.cache.answer([item(1), item(2)], lambda one: [one], lambda _: [np.zeros(10, np.float32)])
    encoder.encode(item(1))
    assert encoder.calls == [1]


def test_whoever_gets_an_answer_cannot_change_it() -> None:
    encoder = Encoder()
    for _ in range(2):
        (answer,) = encoder.encode(item(1))
        with pytest.raises(ValueError, match="read-only"):
            answer[0] = 7


def test_inputs_are_told_apart() -> None:
    """By values, dtypes, shapes, order, and where one array ends and the next begins."""
    encoder = Encoder()
    different: list[list[Array]] = [
        [],
        [item()],
        [item(), item()],
        [item(1, 2)],
        [item(2, 1)],
        [item(1), item(2)],
        [item(1, 2, dtype=np.int32)],
        [item(1, 2, dtype=np.uint64)],
        [item(1, 2).reshape(1, 2)],
        [item(1, 2).reshape(2, 1)],
        [np.zeros((2, 3, 3), np.uint8)],
        [np.zeros((3, 2, 3), np.uint8)],
        [np.zeros((1, 3, 3), np.uint8), np.zeros((1, 3, 3), np.uint8)],
    ]
    for inputs in different:
        encoder.cache.answer([inputs], lambda arrays: arrays, encoder._compute)
    assert encoder.calls == [1] * len(different)
    views = [np.array([1, 9, 2, 9])[::2]]  # the values count, not how they lie in memory
    encoder.cache.answer([views], lambda arrays: arrays, encoder._compute)
    assert len(encoder.calls) == len(different)
