"""Whole rows on different ranks: no rank needs another's tokens until the velocities are gathered.

For a guided request on two devices this is CFG parallelism: one branch each. It balances as well as the rows divide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ditpack.models.qwen_image import QwenImageTransformer
from ditpack.packing.layout import Layout, Row, build_layout
from ditpack.parallel.share import Share, Shared


def share_rows(transformer: QwenImageTransformer, group: dist.ProcessGroup) -> None:
    """Make ``transformer``, in place, compute whole rows on each rank of ``group``, whose ranks all call it alike."""
    Shared(transformer, group, split_rows)


def assign_rows(rows: Sequence[Row], ranks: int) -> list[list[int]]:
    """The rows of each rank, in order: the longest first, each to the rank with the fewest tokens so far."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(rows)), key=lambda i: -rows[i].tokens):
        rank = tokens.index(min(tokens))
        assigned[rank].append(index)
        tokens[rank] += rows[index].tokens
    return [sorted(indices) for indices in assigned]


def split_rows(layout: Layout, rank: int, ranks: int) -> Share:
    """The rows of ``rank``. A rank that gets none computes the first row too, and nobody reads it."""
    device = layout.cu_seqlens.device
    assigned = assign_rows(layout.rows, ranks)
    own = assigned[rank] or [0]
    lengths = [row.image_tokens for row in layout.rows]
    counts = [sum(lengths[row] for row in rows) for rows in assigned]
    image_rows = [2 * row + part for row in own for part in (0, 1)] if layout.split_references else own
    return Share(
        layout=build_layout([layout.rows[row] for row in own], device, split_references=layout.split_references),
        image=_tokens(own, lengths, device),
        text=_tokens(own, layout.text.lengths, device),
        rows=torch.tensor(own).to(device, non_blocking=True),
        image_rows=torch.tensor(image_rows).to(device, non_blocking=True),
        padding=0,
        counts=counts,
        gathered=_gathered(assigned, lengths, max(counts)).to(device, non_blocking=True),
    )


def _tokens(rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """The places of the tokens of ``rows`` in a stream of rows of these lengths."""
    starts = [sum(lengths[:row]) for row in rows]
    places = [torch.arange(start, start + lengths[row]) for start, row in zip(starts, rows, strict=True)]
    return torch.cat(places).to(device, non_blocking=True)


def _gathered(assigned: Sequence[Sequence[int]], lengths: Sequence[int], longest: int) -> Tensor:
    places: dict[int, Tensor] = {}
    for rank, rows in enumerate(assigned):
        start = rank * longest
        for row in rows:
            places[row] = torch.arange(start, start + lengths[row])
            start += lengths[row]
    return torch.cat([places[row] for row in sorted(places)])
