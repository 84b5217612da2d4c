"""CUDA graphs of the transformer's forward for small packs, where launching kernels costs more than running them.

One graph serves every pack of its bucket: token counts and rows are rounded up, and what is too many forms rows of its
own at the tail, which attend to themselves and whose results nobody reads. Lengths and places are device data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ditpack.packing.layout import Row

_STEPS = 16  # buckets to a doubling of the token count: at most 1/16 of a pack is padding
_CAPTURE_AT = 3  # the third step of a bucket captures it: what comes once or twice would not earn the capture back


@dataclass(frozen=True, slots=True)
class Bucket:
    """The rounded sizes that packs of one graph share."""

    image_tokens: int
    text_tokens: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.image_tokens + self.text_tokens

    def padding(self, rows: Sequence[Row]) -> list[Row]:
        """The tail rows that fill ``rows`` up to the bucket."""
        text = self.text_tokens - sum(row.text_tokens for row in rows)
        image = self.image_tokens - sum(row.image_tokens for row in rows)
        count = self.rows - len(rows)
        return [Row(1, ((1, 1),))] * (count - 1) + [Row(text - count + 1, ((1, image - count + 1),))]


def bucket_for(rows: Sequence[Row], max_tokens: int) -> Bucket | None:
    """The bucket of ``rows``, or None when they are more than ``max_tokens`` tokens.

    At least one row is padding, so that there is always one to take the rest, and each padding row gets its token.
    """
    if sum(row.tokens for row in rows) > max_tokens:
        return None
    count = 1 << len(rows).bit_length()  # the next power of two above the number of rows
    extra = count - len(rows)
    image = _round_up(sum(row.image_tokens for row in rows) + extra)
    text = _round_up(sum(row.text_tokens for row in rows) + extra)
    return Bucket(image, text, count)


def _round_up(number: int) -> int:
    step = max(16, (1 << number.bit_length()) // (2 * _STEPS))
    return -(-number // step) * step


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Any
    output: Tensor
    loaded: object  # the pack whose lasting inputs it holds


class GraphCache:
    """Runs ``forward`` eagerly or, for buckets that come again, from a captured graph.

    Args:
        forward: (per-step tensors, lasting inputs) → output. Tensors of equal shapes for equal buckets.
        max_graphs: the least recently used graph is dropped beyond it; all share one memory pool.
    """

    def __init__(self, forward: Callable[[Any, Any], Tensor], max_graphs: int = 48) -> None:
        self._forward = forward
        self._max_graphs = max_graphs
        self._seen: dict[Bucket, int] = {}
        self._graphs: OrderedDict[Bucket, _Graph] = OrderedDict()
        self._pool: Any = None
        self.replays = 0
        self.eager_steps = 0
        self.captures = 0

    def run(self, bucket: Bucket | None, step: tuple[Tensor, ...], lasting: Any, owner: object) -> Tensor:
        """The forward of ``step`` and ``lasting``. ``owner`` identifies the lasting inputs: same owner, same values.

        The result is valid until the next call.
        """
        if bucket is None or not step[0].is_cuda:
            self.eager_steps += 1
            return self._forward(step, lasting)
        graph = self._graphs.get(bucket)
        if graph is None:
            self._seen[bucket] = self._seen.get(bucket, 0) + 1
            if self._seen[bucket] < _CAPTURE_AT:
                self.eager_steps += 1
                return self._forward(step, lasting)
            graph = self._capture(bucket, step, lasting)
        else:
            self._graphs.move_to_end(bucket)
        static_step, static_lasting = graph.inputs
        _copy_into(static_step, step)
        if graph.loaded is not owner:
            _copy_into(static_lasting, lasting)
            graph.loaded = owner
        graph.graph.replay()
        self.replays += 1
        return graph.output

    def _capture(self, bucket: Bucket, step: tuple[Tensor, ...], lasting: Any) -> _Graph:
        self.captures += 1
        while len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        inputs = (_clone(step), _clone(lasting))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(*inputs)  # kernels that compile or tune themselves do it here, outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, pool=self._pool):
            output = self._forward(*inputs)
        self._pool = self._pool or captured.pool()
        graph = self._graphs[bucket] = _Graph(captured, inputs, output, loaded=None)
        return graph


def _clone(value: Any) -> Any:
    """A copy of nested tuples and dataclasses of tensors; everything else stays as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(_clone(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: _clone(getattr(value, field.name)) for field in fields(value)})
    return value


def _copy_into(static: Any, value: Any) -> None:
    """Overwrite the tensors of ``static`` with those of ``value``, which has the same structure."""
    if isinstance(static, Tensor):
        static.copy_(value, non_blocking=True)
    elif isinstance(static, tuple):
        for ours, theirs in zip(static, value, strict=False):
            _copy_into(ours, theirs)
    elif is_dataclass(static) and not isinstance(static, type):
        for field in fields(static):
            _copy_into(getattr(static, field.name), getattr(value, field.name))
