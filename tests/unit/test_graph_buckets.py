"""Buckets for captured graphs: the padding is rows of its own at the tail and changes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engine_tools import conditioning, request, tiny_sampler
from oracle import relative_error

from ditpack.models.graphs import bucket_for
from ditpack.packing.layout import Row, build_layout

CPU = torch.device("cpu")


def random_rows(chance: random.Random) -> list[Row]:
    count = chance.randint(1, 9)
    return [Row(chance.randint(1, 60), ((chance.randint(1, 9), chance.randint(1, 9)),)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(200))
def test_padding_fills_the_bucket_exactly(seed: int) -> None:
    rows = random_rows(random.Random(seed))
    bucket = bucket_for(rows, 10_000)
    assert bucket is not None
    padded = rows + bucket.padding(rows)
    assert len(padded) == bucket.rows > len(rows)
    assert sum(row.text_tokens for row in padded) == bucket.text_tokens
    assert sum(row.image_tokens for row in padded) == bucket.image_tokens


def test_large_packs_have_no_bucket() -> None:
    assert bucket_for([Row(40, ((64, 64),))], 3072) is None


@torch.inference_mode()
def test_padding_changes_no_row(tiny_checkpoint: Path) -> None:
    model = tiny_sampler(tiny_checkpoint).transformer
    rows = random_rows(random.Random(1))
    bucket = bucket_for(rows, 10_000)
    assert bucket is not None
    generator = torch.Generator().manual_seed(0)

    def velocity(layout_rows: list[Row]) -> torch.Tensor:
        layout = build_layout(layout_rows, CPU)
        modulation = model.modulation(torch.linspace(1, 0.1, len(rows)).repeat(2)[: len(layout_rows)])
        pad_image = torch.zeros(len(layout.image.rows) - len(image), image.shape[1])
        pad_text = torch.zeros(len(layout.text.rows) - len(text), text.shape[1])
        return model(
            torch.cat((image, pad_image)), torch.cat((text, pad_text)), modulation, layout, model.rotary(layout)
        )

    image = torch.randn(sum(row.image_tokens for row in rows), model.config.in_channels, generator=generator)
    text = torch.randn(sum(row.text_tokens for row in rows), model.config.joint_attention_dim, generator=generator)
    alone, padded = velocity(rows), velocity(rows + bucket.padding(rows))
    assert torch.allclose(alone, padded[: len(alone)], atol=1e-5)


def test_padded_packs_give_the_same_latents(tiny_checkpoint: Path) -> None:
    """The sampler's own padding, with and without guidance: it ends where the forward ends."""
    sampler = tiny_sampler(tiny_checkpoint)
    for scales in ((4.0, 1.0), (1.0, 1.0), (4.0, 4.0), (1.0,)):
        requests = [request(seed=i, width=32 + 16 * i, true_cfg_scale=scale) for i, scale in enumerate(scales)]
        latents = []
        for graph_tokens in (0, 3072):
            sampler._graph_tokens = graph_tokens
            members = [sampler.begin(r, conditioning(r)) for r in requests]
            pack = sampler.pack(members)
            assert (pack.bucket is not None) == (graph_tokens > 0)
            for _ in range(4):
                sampler.step(pack)
            latents.append([member.latents for member in members])
        for plain, padded in zip(*latents, strict=True):
            assert relative_error(padded, plain) < 1e-5
