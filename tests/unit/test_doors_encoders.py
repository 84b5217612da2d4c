"""``text_encoder`` and ``vae_encoder``: what comes again is not encoded again, and no failure outlives its request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edit_tools import encoded, picture
from fake_pb_utils import MetricFamily
from fake_triton import FakeModel
from test_doors_edit import edit

Inputs = dict[str, np.ndarray]
VALID = [5] * 40
UNKNOWN = [5] * 39 + [10**9]


def ids(*values: int) -> Inputs:
    return {"INPUT_IDS": np.array([*VALID, *values], np.int64)}


class Counted:
    """A loaded model and how many rows or images each call of its encoder got."""

    def __init__(self, name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **parameters: str) -> None:
        self.model = FakeModel(name, {"checkpoint": str(checkpoint), **parameters})
        self.calls: list[int] = []
        self.failures: list[Exception] = []  # what the next calls raise
        encoder = self.model.instance._door._encoder
        encode = encoder.encode

        def counting(first: Sequence[Any], *rest: Any) -> Any:
            self.calls.append(len(first))
            if self.failures:
                raise self.failures.pop(0)
            return encode(first, *rest)

        monkeypatch.setattr(encoder, "encode", counting)

    def infer(self, *inputs: Inputs) -> list[Any]:
        """Each answer's one array, or its error's code."""
        answers = self.model.infer(*(self.model.request(one) for one in inputs))
        return [answer.code or next(iter(answer.outputs.values())) for answer in answers]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    MetricFamily.series.clear()


@pytest.fixture
def text_encoder(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted("text_encoder", tiny_checkpoint, monkeypatch)


def counted(model: str) -> tuple[float, float]:
    """Hits and misses."""
    label = (("model", model),)
    hits, misses = (MetricFamily.series[f"ditpack_cache_{name}_total"][label] for name in ("hits", "misses"))
    return hits, misses


def test_a_prompt_that_comes_again_is_not_encoded_again(text_encoder: Counted) -> None:
    first, other = text_encoder.infer(ids(), ids(6))
    again, burst, new = text_encoder.infer(ids(), ids(), ids(7))
    assert text_encoder.calls == [2, 1]
    assert first.tobytes() == again.tobytes() == burst.tobytes()
    assert len({array.tobytes() for array in (first, other, new)}) == 3
    assert counted("text_encoder") == (2, 3)


def test_a_burst_with_one_negative_prompt_encodes_it_once(text_encoder: Counted) -> None:
    prompts = [ids(index) for index in range(10, 16)]
    answers = text_encoder.infer(*(inputs for prompt in prompts for inputs in (prompt, ids())))
    assert text_encoder.calls == [7]
    assert len({array.tobytes() for array in answers[1::2]}) == 1
    assert len({array.tobytes() for array in answers[::2]}) == 6


def test_one_failure_is_not_given_again(text_encoder: Counted) -> None:
    text_encoder.failures.append(MemoryError("CUDA out of memory"))
    assert text_encoder.infer(ids()) == ["INTERNAL"]
    (answer,) = text_encoder.infer(ids())
    assert answer.shape[0] == 40 - 34
    assert text_encoder.calls == [1, 1]
    assert counted("text_encoder") == (0, 1)


def test_a_bad_row_fails_alone_among_kept_and_new_ones(text_encoder: Counted) -> None:
    (known,) = text_encoder.infer(ids())
    bad = {"INPUT_IDS": np.array(UNKNOWN, np.int64)}
    for _ in range(2):
        kept, refused, new, twice = text_encoder.infer(ids(), bad, ids(8), ids(8))
        assert kept.tobytes() == known.tobytes()
        assert refused == "INVALID_ARG"
        assert new.tobytes() == twice.tobytes()
    # Together (bad and 8), each alone; then 8 is known.
    assert text_encoder.calls == [1, 2, 1, 1, 1, 1]
    assert counted("text_encoder") == (1 + 1 + 3, 2)


@pytest.mark.parametrize(("cache_mib", "calls"), [("0", [1, 1]), ("0.0001", [1, 1]), ("0.01", [1])])
def test_cache_mib_is_the_bound(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cache_mib: str, calls: list[int]
) -> None:
    """Here 768 bytes an answer."""
    encoder = Counted("text_encoder", tiny_checkpoint, monkeypatch, cache_mib=cache_mib)
    for _ in range(2):
        (answer,) = encoder.infer(ids())
        assert answer.nbytes == 768
    assert encoder.calls == calls


class TestEdits:
    WIDE, SQUARE = encoded(picture(150, 70)), encoded(picture(80, 80, 2))

    @pytest.fixture
    def prepare(self, tiny_edit_2509_checkpoint: Path) -> Iterator[FakeModel]:
        model = FakeModel("prepare_edit", {"checkpoint": str(tiny_edit_2509_checkpoint)})
        yield model
        model.instance.finalize()

    def prepared(self, prepare: FakeModel, *files: bytes, prompt: str = "make it snow") -> tuple[Inputs, Inputs]:
        """The inputs of ``text_encoder``, and those of ``vae_encoder``."""
        (answer,) = prepare.infer(prepare.request(edit(*files, prompt=prompt)))
        made = answer.outputs
        return (
            {
                "INPUT_IDS": made["INPUT_IDS"],
                "PIXELS": made["CONDITION_PIXELS"],
                "SIZES": made["CONDITION_SIZES"],
            },
            {"PIXELS": made["REFERENCE_PIXELS"], "SIZES": made["REFERENCE_SIZES"]},
        )

    def test_prompts_are_kept_with_the_photos_they_speak_of(
        self, prepare: FakeModel, tiny_edit_2509_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoder = Counted("text_encoder", tiny_edit_2509_checkpoint, monkeypatch)
        snow, _ = self.prepared(prepare, self.WIDE)
        changed = snow | {"PIXELS": snow["PIXELS"] ^ 255}
        rain, _ = self.prepared(prepare, self.WIDE, prompt="make it rain")
        answers = encoder.infer(snow, changed, rain)
        assert len({array.tobytes() for array in answers}) == 3
        again = encoder.infer(snow, changed, rain)
        assert [array.tobytes() for array in again] == [array.tobytes() for array in answers]
        assert encoder.calls == [3]

    def test_a_photo_that_comes_again_is_not_encoded_again(
        self, prepare: FakeModel, tiny_edit_2509_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoder = Counted("vae_encoder", tiny_edit_2509_checkpoint, monkeypatch)
        _, one = self.prepared(prepare, self.WIDE)
        _, both = self.prepared(prepare, self.WIDE, self.SQUARE)
        _, swapped = self.prepared(prepare, self.SQUARE, self.WIDE)
        first, again, two, other = encoder.infer(one, one, both, swapped)
        assert encoder.calls == [1 + 2 + 2]
        assert first.tobytes() == again.tobytes()
        assert np.array_equal(two, np.concatenate([other[len(two) - len(first) :], other[: len(two) - len(first)]]))
        assert not np.array_equal(two, other)
        assert [array.tobytes() for array in encoder.infer(one, both)] == [first.tobytes(), two.tobytes()]
        assert encoder.calls == [5]
        assert counted("vae_encoder") == (1 + 2, 3)

    def test_a_failure_of_the_vae_is_not_given_again(
        self, prepare: FakeModel, tiny_edit_2509_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoder = Counted("vae_encoder", tiny_edit_2509_checkpoint, monkeypatch)
        _, photo = self.prepared(prepare, self.WIDE)
        bad = {"PIXELS": np.zeros((100, 3), np.uint8), "SIZES": np.array([[10, 10]], np.int32)}
        encoder.failures.append(MemoryError("CUDA out of memory"))
        assert encoder.infer(photo) == ["INTERNAL"]
        done, refused = encoder.infer(photo, bad)
        assert refused == "INVALID_ARG"
        assert encoder.infer(photo)[0].tobytes() == done.tobytes()
        assert encoder.calls == [1, 2, 1, 1]
