"""The packed transformer against diffusers' own, fp32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import reference_forward, reference_transformer, relative_error

from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import load_sampler
from ditpack.models.qwen_image import QwenImageTransformer
from ditpack.packing.layout import Row, build_layout

CPU = torch.device("cpu")
# Odd grids, transposes with equal token counts, equal shapes, text of 1 … 200 tokens, a row with two reference images.
ROWS = [
    Row(1, ((4, 4),)),
    Row(17, ((3, 8),)),
    Row(200, ((8, 3),)),
    Row(5, ((7, 5),)),
    Row(17, ((5, 7),)),
    Row(40, ((4, 4),)),
    Row(9, ((6, 4), (3, 5), (2, 9))),
    Row(33, ((1, 1),)),
]
SIGMAS = [1.0, 0.93, 0.5, 0.02, 0.77, 0.31, 0.66, 0.12]


def load(checkpoint: Path) -> QwenImageTransformer:
    return load_sampler(open_checkpoint(checkpoint), CPU, torch.float32).transformer


def inputs(model: QwenImageTransformer, rows: list[Row]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    config = model.config
    images = [torch.randn(row.image_tokens, config.in_channels, generator=generator) for row in rows]
    texts = [torch.randn(row.text_tokens, config.joint_attention_dim, generator=generator) for row in rows]
    return images, texts


@torch.inference_mode()
def forward(
    model: QwenImageTransformer,
    rows: list[Row],
    images: list[torch.Tensor],
    texts: list[torch.Tensor],
    sigmas: list[float],
) -> list[torch.Tensor]:
    layout = build_layout(rows, CPU)
    out = model(
        torch.cat(images), torch.cat(texts), model.modulation(torch.tensor(sigmas)), layout, model.rotary(layout)
    )
    return list(out.split([row.image_tokens for row in rows]))


@pytest.mark.parametrize("name", ["tiny_checkpoint", "embedded_checkpoint"])
def test_rows_equal_diffusers_alone_and_packed(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    ours, reference = load(path), reference_transformer(path)
    images, texts = inputs(ours, ROWS)
    packed = forward(ours, ROWS, images, texts, SIGMAS)
    for i, row in enumerate(ROWS):
        expected = reference_forward(reference, images[i], texts[i], SIGMAS[i], row.grids)
        alone = forward(ours, [row], [images[i]], [texts[i]], [SIGMAS[i]])[0]
        assert relative_error(alone, expected) < 1e-5, row
        assert relative_error(packed[i], expected) < 1e-5, row


def test_a_transposed_row_is_another_row(tiny_checkpoint: Path) -> None:
    """The oracle test would pass with wrong positions only if positions did not matter: they do."""
    model = load(tiny_checkpoint)
    (image,), (text,) = inputs(model, [Row(5, ((3, 8),))])
    wide = forward(model, [Row(5, ((3, 8),))], [image], [text], [0.5])[0]
    tall = forward(model, [Row(5, ((8, 3),))], [image], [text], [0.5])[0]
    assert relative_error(wide, tall) > 1e-3


@pytest.mark.parametrize("neighbour", [0, 3, len(ROWS) - 1])
def test_a_neighbour_changes_nothing_at_all(neighbour: int, tiny_checkpoint: Path) -> None:
    model = load(tiny_checkpoint)
    images, texts = inputs(model, ROWS)
    sigmas = list(SIGMAS)
    before = forward(model, ROWS, images, texts, sigmas)
    images[neighbour] = images[neighbour] * -3 + 1
    texts[neighbour] = texts[neighbour] * 100
    sigmas[neighbour] = 0.4
    after = forward(model, ROWS, images, texts, sigmas)
    for i in range(len(ROWS)):
        assert torch.equal(before[i], after[i]) == (i != neighbour)


def test_not_even_a_neighbour_full_of_nan(tiny_checkpoint: Path) -> None:
    model = load(tiny_checkpoint)
    images, texts = inputs(model, ROWS)
    before = forward(model, ROWS, images, texts, SIGMAS)
    images[2] = torch.full_like(images[2], float("nan"))
    after = forward(model, ROWS, images, texts, SIGMAS)
    assert after[2].isnan().all()
    assert all(torch.equal(before[i], after[i]) for i in range(len(ROWS)) if i != 2)
