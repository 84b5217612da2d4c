"""Rows → the layout of one packed forward: where every token sits, built from host integers alone.

Flat order: row after row, and inside a row its text tokens, then its image tokens (the target's, then each
reference image's). The text and the image stream keep their tokens in that order too, without the other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """The shape of one row: its text length and the patch grids (height, width) of its images, target first.

    Either may be missing, as in a row without a prompt, but not both: a segment is never empty.

    Raises:
        ValueError: for no tokens at all, a negative length, or a grid without patches.
    """

    text_tokens: int
    grids: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.text_tokens < 0:
            raise ValueError(f"a row cannot have {self.text_tokens} text tokens")
        if any(height < 1 or width < 1 for height, width in self.grids):
            raise ValueError(f"a grid has at least 1x1 patches, got {self.grids}")
        if self.tokens == 0:
            raise ValueError("a row needs at least one token")

    @property
    def target_tokens(self) -> int:
        return self.grids[0][0] * self.grids[0][1]

    @property
    def image_tokens(self) -> int:
        return sum(height * width for height, width in self.grids)

    @property
    def tokens(self) -> int:
        return self.text_tokens + self.image_tokens


@dataclass(frozen=True, slots=True)
class Stream:
    """The text or the image tokens of a pack, one row's after the other's: n tokens of R rows.

    ``rows`` and ``lengths`` say which row of the stream's modulation a token takes. That is its own row, unless the
    layout was built with ``split_references``: then row r's target takes 2r and its reference images take 2r + 1.
    """

    lengths: list[int]  # tokens of each row of the modulation, in order
    rows: Tensor  # int64 [n]: row of the modulation of each token
    slots: Tensor  # int64 [n]: place of each token in the flat order


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of R rows sit: T in all, L of them text, S of them image.

    Lengths are host integers, so no kernel call has to read the device. A segment is what attends to itself alone: a
    row, or padding (``with_segments``), whose tokens are in neither stream.
    """

    rows: tuple[Row, ...]
    lengths: list[int]  # one a segment
    max_seqlen: int
    cu_seqlens: Tensor  # int32 [segments + 1]
    text: Stream
    image: Stream
    text_offsets: Tensor  # int64 [L]: place of each text token in its row's text
    image_grids: Tensor  # int64 [S]: index of each image token's grid among all grids of the pack
    image_offsets: Tensor  # int64 [S]: place of each image token in its grid, row-major

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def split_references(self) -> bool:
        """Whether the image stream's modulation has 2R rows, see ``Stream``."""
        return len(self.image.lengths) > len(self.rows)


def build_layout(
    rows: Sequence[Row], device: torch.device, max_seqlen: int | None = None, split_references: bool = False
) -> Layout:
    """Lay out ``rows`` (at least one). A few integers a row are uploaded; the device expands them to tokens.

    ``max_seqlen`` may be any bound on the rows' lengths; None is the longest. ``split_references``: reference images
    have a modulation of their own, see ``Stream``.
    """
    if not rows:
        raise ValueError("a layout needs at least one row")
    text_lengths = [row.text_tokens for row in rows]
    image_lengths = [row.image_tokens for row in rows]
    lengths = [row.tokens for row in rows]
    row_starts, text_starts, image_starts = _starts(lengths), _starts(text_lengths), _starts(image_lengths)
    # What turns a place in one stream into a place in the flat order, row by row.
    text_shifts = [row_starts[r] - text_starts[r] for r in range(len(rows))]
    image_shifts = [row_starts[r] + text_lengths[r] - image_starts[r] for r in range(len(rows))]

    text_rows, text_offsets = _expand(text_lengths, device)
    image_rows, _ = _expand(image_lengths, device)
    image_slots = _slots(image_rows, image_shifts)
    if split_references:
        image_lengths = [n for row in rows for n in (row.target_tokens, row.image_tokens - row.target_tokens)]
        image_rows, _ = _expand(image_lengths, device)
    image_grids, image_offsets = _expand([height * width for row in rows for height, width in row.grids], device)
    return Layout(
        rows=tuple(rows),
        lengths=lengths,
        max_seqlen=max_seqlen or max(lengths),
        cu_seqlens=_cu_seqlens(lengths, device),
        text=Stream(text_lengths, text_rows, _slots(text_rows, text_shifts)),
        image=Stream(image_lengths, image_rows, image_slots),
        text_offsets=text_offsets,
        image_grids=image_grids,
        image_offsets=image_offsets,
    )


def with_segments(layout: Layout, lengths: list[int]) -> Layout:
    """``layout`` with segments of these lengths in the flat order, such as its rows' and padding behind them."""
    cu_seqlens = _cu_seqlens(lengths, layout.cu_seqlens.device)
    return replace(layout, lengths=lengths, max_seqlen=max(layout.max_seqlen, *lengths), cu_seqlens=cu_seqlens)


def target_places(rows: Sequence[Row], device: torch.device) -> Tensor:
    """int64 [n]: where in the image stream of ``rows`` (at least one) the tokens of their targets are."""
    starts = _starts([row.image_tokens for row in rows])
    row_of_token, place = _expand([row.target_tokens for row in rows], device)
    return _upload(starts, device)[row_of_token] + place


def _cu_seqlens(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor(_starts(lengths), dtype=torch.int32).to(device, non_blocking=True)


def _slots(rows: Tensor, shifts: list[int]) -> Tensor:
    return torch.arange(len(rows), device=rows.device) + _upload(shifts, rows.device)[rows]


def _starts(lengths: Sequence[int]) -> list[int]:
    """Prefix sums: 0, a, a+b, …; one entry more than ``lengths``."""
    return [0, *accumulate(lengths)]


def _upload(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _expand(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each element of consecutive runs of ``lengths``: the index of its run and its place in the run."""
    total = sum(lengths)
    counts = _upload(lengths, device)
    run = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts, output_size=total)
    place = torch.arange(total, device=device) - _upload(_starts(lengths)[:-1], device)[run]
    return run, place
