"""One forward spread over the ranks of a process group: each computes its share of a pack, then all know the whole.

``Shared`` is a pair of hooks around a plain transformer, which sees a smaller pack and knows nothing of ranks. All
ranks call it with the same inputs and get the same result. How much each rank has follows from the host integers of
the layout, so no lengths are exchanged and nothing is read from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ditpack.models.modulation import Modulation
from ditpack.models.qwen_image import PackedRotary, QwenImageTransformer
from ditpack.models.rotary import Rotary
from ditpack.packing.layout import Layout

# Renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Pick = slice | Tensor  # of the tokens or rows of a pack: those side by side, or those at int64 indices


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes of a pack."""

    layout: Layout  # as the transformer is to see it
    image: Pick
    text: Pick
    rows: Pick  # whose modulation its text reads
    image_rows: Pick  # and its image: the same, or of 2R rows where references have their own
    padding: int  # zero tokens to append to its image tokens
    counts: list[int]  # how many image tokens each rank computes, padding left out
    gathered: Tensor  # int64 [S]: where each image token of the pack is among [ranks · max(counts)]


class Shared:
    """Makes ``transformer``, in place, compute a share on each rank of ``group``.

    Args:
        split: (layout, rank, ranks) → that rank's share; called once for each layout.
    """

    def __init__(
        self, transformer: QwenImageTransformer, group: dist.ProcessGroup, split: Callable[[Layout, int, int], Share]
    ) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._split = split
        self._of: tuple[Layout, Share] | None = None  # the last pack; its steps follow one another
        transformer.register_forward_pre_hook(self._take_share)
        transformer.register_forward_hook(self._gather)

    def _share(self, layout: Layout) -> Share:
        if self._of is None or self._of[0] is not layout:
            self._of = (layout, self._split(layout, self.rank, self.ranks))
        return self._of[1]

    def _take_share(self, _module: nn.Module, inputs: Any) -> Any:
        image, text, modulation, layout, rotary = inputs
        share = self._share(layout)
        image_rotary = Rotary(rotary.image.cos[share.image], rotary.image.sin[share.image])
        text_rotary = Rotary(rotary.text.cos[share.text], rotary.text.sin[share.text])
        image = image[share.image]
        if share.padding:
            image = torch.cat((image, image.new_zeros((share.padding, image.shape[1]))))
            zeros = image_rotary.cos.new_zeros((share.padding, image_rotary.cos.shape[1]))
            image_rotary = Rotary(*(torch.cat((table, zeros)) for table in (image_rotary.cos, image_rotary.sin)))
        modulation = Modulation(
            modulation.image[share.image_rows], modulation.text[share.rows], modulation.out[share.image_rows]
        )
        return image, text[share.text], modulation, share.layout, PackedRotary(text_rotary, image_rotary)

    def _gather(self, _module: nn.Module, inputs: Any, velocity: Tensor) -> Tensor:
        """Exchange the computed image tokens; few and narrow, so the shorter shares are filled up to the longest."""
        assert self._of is not None
        share = self._of[1]
        longest = max(share.counts)
        own = share.counts[self.rank]
        sent = velocity[:own]
        if own < longest:
            sent = torch.cat((sent, sent.new_zeros((longest - own, sent.shape[1]))))
        received = sent.new_empty((self.ranks * longest, sent.shape[1]))
        _all_gather(received, sent, group=self.group)
        return received[share.gathered]


def gather_order(counts: list[int], device: torch.device) -> Tensor:
    """Where ranks that hold ``counts`` tokens each, filled up to the longest, have them one after the other."""
    longest = max(counts)
    starts = (rank * longest for rank in range(len(counts)))
    return torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]).to(
        device, non_blocking=True
    )
