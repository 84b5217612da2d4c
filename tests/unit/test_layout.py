"""Layouts: the flat order, its lengths, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ditpack.packing.layout import Row, build_layout

CPU = torch.device("cpu")


def test_text_then_image_row_after_row() -> None:
    layout = build_layout([Row(3, ((2, 4),)), Row(5, ((3, 4),))], CPU)
    assert layout.cu_seqlens.tolist() == [0, 11, 28]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.text.slots.tolist() == [0, 1, 2, *range(11, 16)]
    assert layout.image.slots.tolist() == [*range(3, 11), *range(16, 28)]
    assert (layout.lengths, layout.max_seqlen, layout.tokens) == ([11, 17], 17, 28)
    assert type(layout.max_seqlen) is int


def test_every_slot_is_used_once() -> None:
    rows = [Row(1 + i, ((1 + i % 3, 2 + i), (i % 2 + 1, 3))) for i in range(12)]
    layout = build_layout(rows, CPU)
    slots = torch.cat((layout.text.slots, layout.image.slots)).sort().values
    assert torch.equal(slots, torch.arange(layout.tokens))


def test_tokens_know_their_place() -> None:
    layout = build_layout([Row(2, ((1, 2), (1, 1))), Row(1, ((2, 1),))], CPU)
    assert layout.text.rows.tolist() == [0, 0, 1]
    assert layout.text_offsets.tolist() == [0, 1, 0]
    assert layout.image_grids.tolist() == [0, 0, 1, 2, 2]
    assert layout.image_offsets.tolist() == [0, 1, 0, 0, 1]


def test_rows_without_text_or_without_an_image() -> None:
    layout = build_layout([Row(0, ((2, 2),)), Row(3, ()), Row(2, ((1, 2),)), Row(0, ((1, 1),))], CPU)
    assert layout.cu_seqlens.tolist() == [0, 4, 7, 11, 12]
    assert layout.text.slots.tolist() == [4, 5, 6, 7, 8]
    assert layout.text.rows.tolist() == [1, 1, 1, 2, 2]
    assert layout.image.slots.tolist() == [0, 1, 2, 3, 9, 10, 11]
    assert layout.image.rows.tolist() == [0, 0, 0, 0, 2, 2, 3]


@pytest.mark.parametrize(
    ("text", "grids", "message"),
    [
        (0, (), "at least one token"),
        (-1, ((1, 1),), "cannot have -1 text tokens"),
        (1, ((0, 4),), "at least 1x1 patches"),
        (1, ((4, 4), (2, 0)), "at least 1x1 patches"),
    ],
)
def test_an_empty_segment_cannot_exist(text: int, grids: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Row(text, grids)


def test_no_rows_no_layout() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        build_layout([], CPU)
