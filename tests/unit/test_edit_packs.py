"""Edits and text to image in one pack: each as it is alone, and no row sees another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_tools import Stages, picture
from oracle import reference_forward, reference_transformer, relative_error
from PIL import Image

from ditpack.attention.sdpa import SDPA
from ditpack.models.qwen_image import QwenImageTransformer
from ditpack.packing.layout import Row, build_layout, target_places
from ditpack.request import ImageRequest
from ditpack.sampling.qwen_image import Conditioning, Denoising, Pack, QwenImageSampler

CPU = torch.device("cpu")
# A text-to-image request, an edit of one image and one of three others; sizes, steps and guidance all differ.
REQUESTS: list[tuple[dict[str, Any], list[tuple[int, int]]]] = [
    ({"PROMPT": "a red kite", "WIDTH": 96, "HEIGHT": 48, "NUM_INFERENCE_STEPS": 6}, []),
    ({"PROMPT": "make it snow", "NUM_INFERENCE_STEPS": 4, "TRUE_CFG_SCALE": 1.0}, [(60, 200)]),
    ({"PROMPT": "all of them at night", "NUM_INFERENCE_STEPS": 5, "HEIGHT": 80}, [(150, 70), (90, 90), (70, 110)]),
    ({"PROMPT": "x", "NUM_INFERENCE_STEPS": 3, "WIDTH": 32, "HEIGHT": 32}, [(64, 64), (64, 64)]),
]
ROWS = [
    Row(5, ((3, 4),)),
    Row(17, ((4, 4), (2, 6))),
    Row(1, ((5, 3), (4, 4), (1, 7), (3, 3))),
    Row(9, ((2, 2),)),
    Row(30, ((4, 4), (4, 4))),
]
SIGMAS = [1.0, 0.77, 0.02, 0.5, 0.31]


@pytest.fixture(scope="module", params=["tiny_edit_2509_checkpoint", "tiny_edit_2511_checkpoint"])
def stages(request: pytest.FixtureRequest) -> Stages:
    return Stages(request.getfixturevalue(request.param))


@functools.cache
def prepared(stages: Stages, index: int, others: bool) -> tuple[ImageRequest, Conditioning]:
    values, sizes = REQUESTS[index]
    images: list[Image.Image] = [picture(*size, 99 if others else seed) for seed, size in enumerate(sizes)]
    return stages.prepare({"SEED": index, **values}, images)


def begin(stages: Stages, chosen: list[int], others: int | None = None) -> list[Denoising]:
    """The requests ``chosen``; ``others`` names one that comes with other images."""
    return [stages.sampler.begin(*prepared(stages, index, index == others)) for index in chosen]


def test_each_equals_its_solo_result(stages: Stages) -> None:
    alone = [stages.denoise(begin(stages, [index]))[0] for index in range(len(REQUESTS))]
    packed = stages.denoise(begin(stages, list(range(len(REQUESTS)))))
    for solo, together in zip(alone, packed, strict=True):
        assert relative_error(together, solo) < 1e-5


@torch.inference_mode()
def velocities(stages: Stages, others: int | None = None) -> dict[int, torch.Tensor]:
    members = begin(stages, list(range(len(REQUESTS))), others)
    pack = stages.sampler.pack(members)
    parts = stages.sampler.velocity(pack).split([len(member.latents) for member in pack.members])
    return {member.request.seed: part for member, part in zip(pack.members, parts, strict=True)}


@pytest.mark.parametrize("other", [1, 2, 3])
def test_anothers_images_change_nothing_at_all(stages: Stages, other: int) -> None:
    before, after = velocities(stages), velocities(stages, others=other)
    for index in range(len(REQUESTS)):
        assert torch.equal(before[index], after[index]) == (index != other)


@torch.inference_mode()
def forward(model: QwenImageTransformer, rows: list[Row], sigmas: list[float], inputs: Any) -> list[torch.Tensor]:
    images, texts = inputs
    zero = model.config.zero_cond_t
    layout = build_layout(rows, CPU, split_references=zero)
    table = model.modulation(torch.tensor([*sigmas, 0.0]))
    slots = torch.arange(len(rows))
    modulation = table.rows(slots, torch.tensor([len(rows)]) if zero else None)
    out = model(torch.cat(images), torch.cat(texts), modulation, layout, model.rotary(layout))
    return list(out.split([row.image_tokens for row in rows]))


def test_rows_equal_diffusers_alone_and_packed(stages: Stages) -> None:
    """The transformer by itself, every token, with ``zero_cond_t`` too."""
    model = stages.sampler.transformer
    generator = torch.Generator().manual_seed(3)
    images = [torch.randn(row.image_tokens, 64, generator=generator) for row in ROWS]
    texts = [torch.randn(row.text_tokens, 32, generator=generator) for row in ROWS]
    reference = reference_transformer(stages.checkpoint.path)
    packed = forward(model, ROWS, SIGMAS, (images, texts))
    for i, row in enumerate(ROWS):
        expected = reference_forward(reference, images[i], texts[i], SIGMAS[i], row.grids)
        assert relative_error(packed[i], expected) < 1e-5, row
        alone = forward(model, [row], SIGMAS[i : i + 1], (images[i : i + 1], texts[i : i + 1]))[0]
        assert relative_error(alone, expected) < 1e-5, row


def test_zero_cond_t_makes_a_difference(tiny_edit_2509_checkpoint: Path, tiny_edit_2511_checkpoint: Path) -> None:
    """The two checkpoints have the same weights: what differs is how references are modulated."""
    plain, zero = (velocities(Stages(path)) for path in (tiny_edit_2509_checkpoint, tiny_edit_2511_checkpoint))
    assert relative_error(zero[0], plain[0]) < 1e-6  # text to image has no references
    assert all(relative_error(zero[index], plain[index]) > 1e-3 for index in (1, 2, 3))


def test_padding_for_graphs_changes_nothing(stages: Stages) -> None:
    """And equal buckets have inputs of equal shapes, so that one captured graph serves them."""
    sampler = stages.sampler
    plain = velocities(stages)
    try:
        sampler._graph_tokens = 4096
        padded = velocities(stages)
        packs: list[Pack] = []
        for chosen in ([1, 2], [2, 1]):
            packs.append(sampler.pack(begin(stages, chosen)))
    finally:
        sampler._graph_tokens = 0
    for index in plain:
        assert relative_error(padded[index], plain[index]) < 1e-5
    first, second = packs
    assert first.bucket == second.bucket is not None
    for name in ("image", "text"):
        assert getattr(first, name).shape == getattr(second, name).shape
        for field in ("rows", "slots"):
            ours, theirs = (getattr(getattr(pack.layout, name), field) for pack in packs)
            assert ours.shape == theirs.shape
    assert first.modulation_slots.shape[1] == second.modulation_slots.shape[1]


def test_references_are_in_the_pack_once(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step writes the targets into its own copy of the image stream and lays out, uploads and rotates nothing."""
    sampler = stages.sampler
    members = begin(stages, [2])
    pack = sampler.pack(members)
    image, places = pack.image.clone(), target_places(members[0].rows, CPU)

    def nothing(*_: Any) -> None:
        raise AssertionError("a step laid out again")

    monkeypatch.setattr("ditpack.sampling.qwen_image.build_layout", nothing)
    monkeypatch.setattr("ditpack.sampling.qwen_image.target_places", nothing)
    monkeypatch.setattr(QwenImageTransformer, "rotary", nothing)
    while pack.steps_left:
        sampler.step(pack)
    assert torch.equal(pack.image, image)
    rest = torch.ones(len(image), dtype=torch.bool)
    rest[places] = False
    assert torch.equal(image[rest], torch.cat([members[0].references] * 2))
    assert not image[~rest].any()


def test_nothing_is_read_back(stages: Stages) -> None:
    """The step loop on the meta device, whose tensors have no values."""
    real = stages.sampler
    with torch.device("meta"):
        transformer = QwenImageTransformer(real.transformer.config, SDPA.load())
    sampler = QwenImageSampler(transformer, real.schedule, real.pixels_per_patch)
    (member,) = begin(stages, [2])
    moved = Denoising(
        request=member.request,
        embeds=tuple(embeds.to("meta") for embeds in member.embeds),
        references=member.references.to("meta"),
        rows=member.rows,
        grid=member.grid,
        sigmas=member.sigmas,
        latents=member.latents.to("meta"),
    )
    pack = sampler.pack([moved])
    while pack.steps_left:
        sampler.step(pack)
