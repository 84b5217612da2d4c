"""Sequence parallelism after Ulysses (Jacobs et al. 2023, arXiv:2309.14509) over packs of any rows.

Outside attention each of P ranks holds a chunk of the flat order, text and image tokens alike, and runs the plain model
on it. For attention one all-to-all turns chunks of tokens with all heads into all tokens with H/P of the heads, and one
turns the result back. The flat order is filled up to a multiple of P once, at its tail, so all chunks are equal:

``segment``   the padding is a segment of its own: nobody attends to it, the kernel is the same, the result exact.
``masked``    what others do to be exact: a key mask, and every layer unpads by it before attention and pads after.
``unmasked``  what others do to be fast: the padding counts to the last row, which attends to it. Not exact.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from ditpack.attention import VarlenAttention
from ditpack.models.qwen_image import JointAttention, QwenImageTransformer
from ditpack.packing.layout import Layout, Stream, with_segments
from ditpack.parallel.share import Share, Shared, gather_order

logger = logging.getLogger(__name__)

PADDING_MODES = ("segment", "masked", "unmasked")


def check_degree(heads: int, degree: int) -> None:
    """Raise ValueError, naming the degrees that ``heads`` heads allow, when ``degree`` is not one of them."""
    if degree < 1 or heads % degree:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(f"{heads} attention heads cannot be split over {degree} devices, but over {allowed}")


class Ulysses:
    """Makes ``transformer``, in place, run sequence-parallel over ``group``, whose ranks all call it alike.

    Raises:
        ValueError: the transformer's heads cannot be split over the group, or the padding mode is unknown.
    """

    def __init__(self, transformer: QwenImageTransformer, group: dist.ProcessGroup, padding: str = "segment") -> None:
        config = transformer.config
        check_degree(config.num_attention_heads, dist.get_world_size(group))
        if padding not in PADDING_MODES:
            raise ValueError(f"sp_padding = {padding!r}: must be one of {', '.join(PADDING_MODES)}")
        self.padding = padding
        self.exchange = Exchange(group, config.num_attention_heads, config.attention_head_dim)
        self._warned: set[tuple[int, int]] = set()
        Shared(transformer, group, self._split)
        for module in transformer.modules():
            if isinstance(module, JointAttention):
                module.allocate = self.exchange.allocate
                module.attention = self.exchange.around(module.attention)

    def _split(self, layout: Layout, rank: int, ranks: int) -> Share:
        tokens, padding = layout.tokens, -layout.tokens % ranks
        if padding and self.padding == "unmasked" and (tokens, ranks) not in self._warned:
            self._warned.add((tokens, ranks))
            logger.warning(
                "sp_padding = unmasked: over %d devices a pack of %d tokens gets %d of padding, which the attention of "
                "its last row sees; sp_padding = segment gives the exact result at the same speed",
                ranks, tokens, padding,
            )  # fmt: skip
        return split_tokens(layout, rank, ranks, self.padding)


class Exchange:
    """The two all-to-alls around attention and the memory for them, which all layers use in turn.

    The H heads are in P groups of h; rank p attends to group p.
    """

    def __init__(self, group: dist.ProcessGroup, heads: int, head_dim: int) -> None:
        self.group = group
        self._ranks = dist.get_world_size(group)
        self._heads, self._head_dim = heads // self._ranks, head_dim
        self._layout: Layout | None = None  # the pack that the memory was made for
        self._sent = self._received = self._returned = torch.empty(0)
        self._real: Tensor | None = None  # masked: bool [T], False for padding

    def allocate(self, like: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Where this rank's queries, keys and values are to be written: [T/P, P, h, head_dim] each.

        In memory they are [P, T/P, 3, h, head_dim]: what one rank is to get lies together, and what all send it is
        in the flat order. The padding's places hold zeros, because no kernel may meet a NaN there.
        """
        if self._layout is not layout:
            chunk = -(-layout.tokens // self._ranks)
            groups = (self._ranks, chunk)
            self._sent = like.new_zeros((*groups, 3, self._heads, self._head_dim))
            self._received = torch.empty_like(self._sent)
            self._returned = like.new_empty((*groups, self._heads * self._head_dim))
            self._real = None
            if layout.tokens % self._ranks:  # only where padding is no segment
                self._real = torch.arange(self._ranks * chunk, device=like.device) < layout.tokens
            self._layout = layout
        q, k, v = self._sent.transpose(0, 1).unbind(2)
        return q, k, v

    def around(self, attention: VarlenAttention) -> VarlenAttention:
        """``attention`` of this rank's heads over all tokens, read where they were allocated.

        The result is [T/P, P, h · head_dim], of all heads and this rank's tokens.

        On a GPU only the device waits for an exchange; the host goes on.
        """

        def attend(_q: Tensor, _k: Tensor, _v: Tensor, layout: Layout) -> Tensor:
            self.all_to_all(self._received, self._sent).wait()
            q, k, v = self._received.flatten(0, 1).unbind(1)  # [T, h, head_dim] each
            out = attention(q, k, v, layout) if self._real is None else self._masked(attention, q, k, v, layout)
            self.all_to_all(self._returned, out.reshape(self._returned.shape)).wait()
            return self._returned.transpose(0, 1)

        return attend

    def all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work:
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        assert work is not None
        return work

    def _masked(self, attention: VarlenAttention, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Unpad, attend, pad. Finding the real tokens makes the host wait for the device, in every layer."""
        assert self._real is not None
        real = self._real.nonzero().flatten()
        out = q.new_zeros(q.shape)
        out[real] = attention(q[real], k[real], v[real], layout)
        return out


def split_tokens(layout: Layout, rank: int, ranks: int, padding_mode: str) -> Share:
    """The chunk of ``rank``: its tokens of both streams, with slots counted from the chunk's start.

    The share's segments are those of the whole pack. Everything follows from host integers.
    """
    padding = -layout.tokens % ranks
    chunk = (layout.tokens + padding) // ranks
    chunks = [(r * chunk, (r + 1) * chunk) for r in range(ranks)]
    texts, images, start = [], [], 0
    image_lengths = iter(layout.image.lengths)
    for row in layout.rows:
        texts.append((start, start + row.text_tokens))
        start += row.text_tokens
        for length in islice(image_lengths, 2 if layout.split_references else 1):
            images.append((start, start + length))
            start += length

    begin, end = chunks[rank]
    text, text_tokens = _local(layout.text, texts, begin, end)
    image, image_tokens = _local(layout.image, images, begin, end)
    counts = [sum(_overlap(span, a, b) for span in images) for a, b in chunks]
    attended = 0
    lengths = layout.lengths
    if padding and padding_mode == "segment":
        lengths = [*lengths, padding]
    elif padding and padding_mode == "unmasked":
        lengths = [*lengths[:-1], lengths[-1] + padding]
        attended = _overlap((layout.tokens, layout.tokens + padding), begin, end)
        image = _with_padding(image, attended, chunk)
    return Share(
        layout=replace(with_segments(layout, lengths), text=text, image=image),
        image=image_tokens,
        text=text_tokens,
        rows=slice(None),
        image_rows=slice(None),
        padding=attended,
        counts=counts,
        gathered=gather_order(counts, layout.image.slots.device),
    )


def _overlap(span: tuple[int, int], begin: int, end: int) -> int:
    return max(0, min(span[1], end) - max(span[0], begin))


def _local(stream: Stream, spans: list[tuple[int, int]], begin: int, end: int) -> tuple[Stream, slice]:
    """The part of ``stream`` that lies in [begin, end); ``spans``: where in the flat order its ``lengths`` lie."""
    lengths = [_overlap(span, begin, end) for span in spans]
    first = sum(_overlap(span, 0, begin) for span in spans)
    tokens = slice(first, first + sum(lengths))
    return Stream(lengths, stream.rows[tokens], stream.slots[tokens] - begin), tokens


def _with_padding(image: Stream, padding: int, chunk: int) -> Stream:
    """``image`` with the last ``padding`` tokens of the chunk as the last row's."""
    device = image.slots.device
    rows = torch.full((padding,), len(image.lengths) - 1, device=device)
    slots = torch.arange(chunk - padding, chunk, device=device)
    lengths = [*image.lengths[:-1], image.lengths[-1] + padding]
    return Stream(lengths, torch.cat((image.rows, rows)), torch.cat((image.slots, slots)))
