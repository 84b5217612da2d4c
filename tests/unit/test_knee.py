"""The measured token budget, on a device whose step times are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_tools import tiny_sampler

from ditpack.sampling import knee


def measured(monkeypatch: pytest.MonkeyPatch, path: Path, seconds: dict[int, float]) -> knee.Knee:
    monkeypatch.setattr(knee, "_step_seconds", lambda _sampler, rows, tokens: seconds[rows * tokens])
    return knee.measure_knee(tiny_sampler(path), tuple(seconds))


def test_the_smallest_pack_with_nearly_the_best_rate(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> None:
    seconds = {1024: 0.030, 2048: 0.040, 4096: 0.072, 8192: 0.140, 16384: 0.300}
    found = measured(monkeypatch, tiny_checkpoint, seconds)
    assert found.tokens == 4096
    assert found.rates[4096] == round(4096 / 0.072)


def test_slow_devices_are_not_asked_for_more(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> None:
    found = measured(monkeypatch, tiny_checkpoint, {1024: 2.0, 2048: 4.0})
    assert found == knee.Knee(1024, {1024: 512})


def test_real_packs_are_timed(tiny_checkpoint: Path) -> None:
    found = knee.measure_knee(tiny_sampler(tiny_checkpoint), (64, 256))
    assert set(found.rates) == {64, 256}
    assert all(rate > 0 for rate in found.rates.values())


def test_a_cpu_does_not_measure(tiny_checkpoint: Path) -> None:
    assert knee.default_token_budget(tiny_sampler(tiny_checkpoint)) == 16384
