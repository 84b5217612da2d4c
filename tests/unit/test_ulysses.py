"""Sequence and row parallelism on real processes (gloo, fp32) against the same model in one process."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks, group
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ditpack.attention.sdpa import SDPA
from ditpack.models.quantized import quantize_blocks
from ditpack.models.qwen_image import QwenImageConfig, QwenImageTransformer
from ditpack.packing.layout import Row, build_layout
from ditpack.parallel.rows import assign_rows, share_rows
from ditpack.parallel.ulysses import Ulysses, check_degree

CPU = torch.device("cpu")
DEGREES = (2, 3, 4)  # of 12 heads
CONFIG = QwenImageConfig(
    num_layers=2, num_attention_heads=12, attention_head_dim=8, joint_attention_dim=16, axes_dims_rope=(2, 2, 4)
)
MIX = [
    Row(1, ((4, 4),)),
    Row(17, ((3, 8),)),
    Row(60, ((8, 3),)),
    Row(5, ((7, 5),)),
    Row(9, ((6, 4), (3, 5), (2, 9))),  # an edit: the target and two reference images
    Row(33, ((1, 1),)),
]
PACKS = {
    # 6889 tokens of 1328 x 1328 pixels, scaled down: one row, all paddings from 0 to 3.
    **{f"odd{text}": [Row(text, ((9, 7),))] for text in range(5, 9)},
    "guidance pair": [Row(21, ((9, 7),)), Row(2, ((9, 7),))],
    "shorter than the ranks": [Row(1, ((1, 1),))],
    "short rows": [Row(1, ((1, 1),)), Row(2, ((1, 1),)), Row(1, ((1, 2),)), Row(1, ((1, 1),))],
    "text only on most ranks": [Row(90, ((1, 2),))],
    "rows without text": [Row(0, ((5, 5),)), Row(3, ((2, 2),)), Row(0, ((1, 1),))],
    "mix": MIX,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks(max(DEGREES), tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()


def model(fp8: bool = False, zero_cond_t: bool = False) -> QwenImageTransformer:
    generator = torch.Generator().manual_seed(0)
    config = dataclasses.replace(CONFIG, zero_cond_t=zero_cond_t)
    transformer = QwenImageTransformer(config, SDPA.load()).requires_grad_(False)
    for parameter in transformer.parameters():
        scale = 0.3 if parameter.dim() == 1 else 0.7 * parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    if fp8:
        quantize_blocks(transformer.transformer_blocks)
    return transformer


@torch.inference_mode()
def forward(transformer: QwenImageTransformer, rows: list[Row], poisoned: int | None = None) -> Tensor:
    """The velocity of random inputs; row ``poisoned`` is full of NaN."""
    generator = torch.Generator().manual_seed(1)
    zero = [0.0] if transformer.config.zero_cond_t else []
    layout = build_layout(rows, CPU, split_references=bool(zero))
    image = torch.randn(sum(layout.image.lengths), CONFIG.in_channels, generator=generator)
    text = torch.randn(sum(layout.text.lengths), CONFIG.joint_attention_dim, generator=generator)
    if poisoned is not None:
        image[layout.image.rows == poisoned] = torch.nan
    table = transformer.modulation(torch.tensor([*torch.rand(len(rows), generator=generator).tolist(), *zero]))
    modulation = table.rows(torch.arange(len(rows)), torch.tensor([len(rows)]) if zero else None)
    return transformer(image, text, modulation, layout, transformer.rotary(layout))


def sharded(
    degree: int,
    packs: list[list[Row]],
    mode: str,
    fp8: bool = False,
    poisoned: int | None = None,
    zero_cond_t: bool = False,
) -> list[Tensor]:
    """In a rank: ``forward`` of each of ``packs``, one after the other, over the first ``degree`` ranks."""
    transformer = model(fp8, zero_cond_t)
    if mode == "rows":
        share_rows(transformer, group(degree))
    else:
        Ulysses(transformer, group(degree), mode)
    results = []
    for rows in packs:
        forward(transformer, rows[:1])  # what another pack left behind must not matter
        results.append(forward(transformer, rows, poisoned))
    return results


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).abs().max() / exact.abs().max())


@functools.cache
def exact_packs() -> list[Tensor]:
    """Of each of PACKS, in one process."""
    transformer = model()
    return [forward(transformer, rows) for rows in PACKS.values()]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("mode", ["segment", "masked", "rows"])
def test_equals_one_process(mode: str, degree: int, ranks: Ranks) -> None:
    for rank in ranks.call(degree, sharded, [*PACKS.values()], mode):
        for pack, ours, exact in zip(PACKS, rank, exact_packs(), strict=True):
            assert error(ours, exact) < 1e-5, pack


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("mode", ["segment", "masked", "rows"])
def test_edits_with_zero_cond_t(mode: str, degree: int, ranks: Ranks) -> None:
    """References have a modulation of their own, wherever a chunk cuts the row."""
    exact = forward(model(zero_cond_t=True), MIX)
    assert error(forward(model(), MIX), exact) > 1e-3
    for (ours,) in ranks.call(degree, sharded, [MIX], mode, False, None, True):
        assert error(ours, exact) < 1e-5


def test_the_packs_cover_every_padding() -> None:
    for degree in DEGREES:
        paddings = {-sum(row.tokens for row in rows) % degree for rows in PACKS.values()}
        assert paddings == set(range(degree))


@pytest.mark.parametrize("degree", DEGREES)
def test_unmasked_padding_changes_the_last_row(
    degree: int, ranks: Ranks, record_property: pytest.RecordProperty
) -> None:
    first = ranks.call(degree, sharded, [*PACKS.values()], "unmasked")[0]
    for (pack, rows), ours, exact in zip(PACKS.items(), first, exact_packs(), strict=True):
        padding = -sum(row.tokens for row in rows) % degree
        last = rows[-1].image_tokens
        off = error(ours[-last:], exact[-last:])
        record_property(f"{pack} P={degree} padding={padding}", off)
        if padding:
            assert 1e-4 < off < 1, f"{pack}: {off}"
            assert torch.equal(ours[-last:], exact[-last:]) is False
        else:
            assert off < 1e-5
        if len(rows) > 1:
            assert error(ours[:-last], exact[:-last]) < 1e-5


@pytest.mark.parametrize("mode", ["segment", "rows"])
def test_a_neighbour_full_of_nan_changes_nothing(mode: str, ranks: Ranks) -> None:
    (clean,) = ranks.call(3, sharded, [MIX], mode)[0]
    (poisoned,) = ranks.call(3, sharded, [MIX], mode, False, 2)[0]
    rows = build_layout(MIX, CPU).image.rows
    assert poisoned[rows == 2].isnan().all()
    assert torch.equal(poisoned[rows != 2], clean[rows != 2])


@pytest.mark.parametrize("pack", ["mix", "shorter than the ranks"])
def test_fp8(pack: str, ranks: Ranks) -> None:
    """A token's 8-bit values may round the other way, so the bound is that of 8-bit noise."""
    exact = forward(model(fp8=True), PACKS[pack])
    for (ours,) in ranks.call(4, sharded, [PACKS[pack]], "segment", True):
        assert float((ours - exact).norm() / exact.norm()) < 5e-3


class NoReadback(TorchDispatchMode):
    """Fails when a tensor's value comes to the host: ``item``, truth, ``nonzero``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), str(func)
        return func(*args, **(kwargs or {}))


def reads(degree: int, rows: list[Row], mode: str) -> str | None:
    transformer = model()
    share_rows(transformer, group(degree)) if mode == "rows" else Ulysses(transformer, group(degree), mode)
    try:
        with NoReadback():
            forward(transformer, rows)
    except AssertionError as read:
        return str(read)
    return None


@pytest.mark.parametrize("mode", ["segment", "unmasked", "rows", "masked"])
def test_nothing_is_read_from_the_device(mode: str, ranks: Ranks) -> None:
    """But by ``masked``, as others do; so this test can fail."""
    assert ranks.call(2, reads, PACKS["odd6"], mode) == 2 * ["aten.nonzero.default" if mode == "masked" else None]


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def warnings(degree: int, mode: str) -> list[str]:
    handler = Warnings()
    logger = logging.getLogger("ditpack.parallel.ulysses")
    logger.addHandler(handler)
    transformer = model()
    Ulysses(transformer, group(degree), mode)
    for pack in ("odd5", "odd6", "odd8", "odd5", "odd8"):
        forward(transformer, PACKS[pack])
    logger.removeHandler(handler)
    return handler.messages


def test_unmasked_warns_once_a_length(ranks: Ranks) -> None:
    first, second = ranks.call(3, warnings, "unmasked")[0]
    assert "over 3 devices a pack of 68 tokens gets 1 of padding" in first
    assert "over 3 devices a pack of 71 tokens gets 1 of padding" in second  # and 69 tokens need none
    assert "sp_padding = segment" in first
    assert ranks.call(3, warnings, "segment")[0] == []


def test_degrees() -> None:
    for degree in (1, 2, 3, 4, 6, 8, 12, 24):
        check_degree(24, degree)
    with pytest.raises(
        ValueError, match="24 attention heads cannot be split over 5 devices, but over 1, 2, 3, 4, 6, 8, 12, 24"
    ):
        check_degree(24, 5)


def refused(degree: int, heads: int, mode: str) -> str:
    config = dataclasses.replace(CONFIG, num_attention_heads=heads)
    try:
        Ulysses(QwenImageTransformer(config, SDPA.load()), group(degree), mode)
    except ValueError as refusal:
        return str(refusal)
    return "taken"


def test_what_does_not_fit_is_refused(ranks: Ranks) -> None:
    assert ranks.call(3, refused, 4, "segment")[0].endswith("but over 1, 2, 4")
    assert ranks.call(2, refused, 4, "none")[0] == "sp_padding = 'none': must be one of segment, masked, unmasked"


def test_rows_are_balanced_by_tokens() -> None:
    rows = [Row(1, ((n, 1),)) for n in (9, 1, 5, 5, 1)]  # 10, 2, 6, 6 and 2 tokens
    assert assign_rows(rows, 2) == [[0, 1, 4], [2, 3]]
    assert assign_rows(rows, 4) == [[0], [2], [3], [1, 4]]
    assert assign_rows(rows[:1], 3) == [[0], [], []]
