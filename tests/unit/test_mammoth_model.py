"""The packed MammothModa2 transformer against the plain reference module, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mammoth_oracle import Oracle
from mammoth_tools import LLM_WIDTH, mammoth_sampler
from oracle import relative_error
from torch import Tensor

from ditpack.attention.sdpa import SDPA
from ditpack.models.mammoth_config import RefinerConfig
from ditpack.models.mammoth_moda2 import MammothModa2Transformer
from ditpack.models.qformer import QFormer, valid_heads
from ditpack.packing.layout import Row
from ditpack.sampling.latents import pack_latents, unpack_latents
from ditpack.sampling.mammoth_moda2 import MammothModa2Sampler

CPU = torch.device("cpu")
CASES = [  # text tokens, visual tokens, patch grid, time; no tokens at all is the unconditional branch
    (5, 3, (4, 4), 0.0),
    (0, 0, (4, 4), 0.0),
    (1, 30, (2, 6), 0.31),
    (17, 7, (5, 3), 0.5),
    (0, 9, (1, 1), 0.73),
    (0, 0, (6, 2), 0.31),
    (8, 64, (7, 4), 0.99),
]


@pytest.fixture(
    scope="module",
    params=["mammoth_checkpoint", "mammoth_dev_checkpoint"],
    ids=["separate refiner", "nested refiner"],
)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def sampler(checkpoint: Path) -> MammothModa2Sampler:
    return mammoth_sampler(checkpoint)


def states(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, LLM_WIDTH, generator=torch.Generator().manual_seed(seed))


def latents(grid: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(4, 2 * grid[0], 2 * grid[1], generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def packed(model: MammothModa2Transformer, cases: list[tuple[int, int, tuple[int, int], float]]) -> list[Tensor]:
    """The velocities [4, 2h, 2w] of all rows from one forward. A row's inputs depend on its case alone."""
    conditioned = [(states(text, text + 1), states(image, image + 2)) for text, image, _, _ in cases if image]
    contexts = iter(model.context(conditioned) if conditioned else ())
    rows, context = [], []
    for _, image, grid, _ in cases:
        context.append(next(contexts) if image else torch.zeros(0, 48))
        rows.append(Row(len(context[-1]), (grid,)))
    tokens = [pack_latents(latents(grid, 7), channel_last=True) for _, _, grid, _ in cases]
    times = torch.tensor([time for *_, time in cases])
    out = model(torch.cat(tokens), torch.cat(context), times, model.plan(rows, CPU))
    split = out.split([len(row) for row in tokens])
    return [unpack_latents(row, case[2], channel_last=True) for row, case in zip(split, cases, strict=True)]


def test_every_row_equals_the_reference(checkpoint: Path, sampler: MammothModa2Sampler) -> None:
    oracle = Oracle(checkpoint)
    for (text, image, grid, time), ours in zip(CASES, packed(sampler.transformer, CASES), strict=True):
        theirs = oracle.velocity(latents(grid, 7), time, states(text, text + 1), states(image, image + 2))
        assert relative_error(ours, theirs) < 1e-5, (text, image, grid, time)


def test_a_row_is_the_same_alone(sampler: MammothModa2Sampler) -> None:
    """Nested, with unequal text lengths, too: a row's queries follow its own text, not the longest one's."""
    for case, together in zip(CASES, packed(sampler.transformer, CASES), strict=True):
        (alone,) = packed(sampler.transformer, [case])
        assert relative_error(together, alone) < 1e-5


def test_a_changed_neighbour_changes_nothing(sampler: MammothModa2Sampler) -> None:
    model = sampler.transformer
    first = packed(model, CASES)
    changed = [*CASES[:3], (*CASES[3][:3], float("nan")), *CASES[4:]]
    second = packed(model, changed)
    assert not second[3].isfinite().any()
    for index in (0, 1, 2, 4, 5, 6):
        assert torch.equal(first[index], second[index])


@pytest.mark.parametrize("inputs", [1, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 3])
def test_all_queries_are_kept_however_many_inputs(
    inputs: int, rows: int, sampler: MammothModa2Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 128 queries: the conditioning never has the inputs' length, and every query reaches the transformer."""
    model = sampler.transformer
    assert model.image_refiner is not None
    query = torch.randn(1, 128, model.image_refiner.query.shape[2], generator=torch.Generator().manual_seed(0))
    monkeypatch.setitem(model.image_refiner._parameters, "query", torch.nn.Parameter(query))
    given = [(states(2 + row, row), states(inputs, row)) for row in range(rows)]
    with torch.inference_mode():
        contexts = model.context(given)
        assert [len(context) for context in contexts] == [2 + row + 128 for row in range(rows)]
        query[0, 127] += 1
        moved = model.context(given)
    for before, after in zip(contexts, moved, strict=True):
        assert not torch.equal(before[-1], after[-1]), "the last query has no effect"


def test_the_refiner_is_blind_to_nothing_and_to_nobody_else(sampler: MammothModa2Sampler) -> None:
    model = sampler.transformer
    given = [(states(3, 1), states(5, 2)), (states(6, 3), states(90, 4))]
    with torch.inference_mode():
        first = model.context(given)
        given[1] = (given[1][0], torch.cat((given[1][1][:-1], 2 * states(1, 9))))
        second = model.context(given)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_without_a_refiner_the_visual_states_are_used_as_they_are(mammoth_checkpoint: Path) -> None:
    sampler, oracle = mammoth_sampler(mammoth_checkpoint), Oracle(mammoth_checkpoint)
    model = sampler.transformer
    model.image_refiner = None
    oracle.config["gen_image_condition_refiner_config"] = None
    for (text, image, grid, time), ours in zip(CASES, packed(model, CASES), strict=True):
        theirs = oracle.velocity(latents(grid, 7), time, states(text, text + 1), states(image, image + 2))
        assert relative_error(ours, theirs) < 1e-5


def test_positions_come_from_the_rows_own_conditioning(sampler: MammothModa2Sampler) -> None:
    """(l, l, l) for the context, then (its length, row, column)."""
    plan = sampler.transformer.plan([Row(2, ((2, 3),)), Row(0, ((1, 2),))], CPU)
    positions = [(0, 0, 0), (1, 1, 1), *((2, r, c) for r in range(2) for c in range(3)), (0, 0, 0), (0, 0, 1)]
    dims = (4, 4, 8)
    frequencies = [[10000 ** (-2 * i / dim) for i in range(dim // 2)] for dim in dims]
    angles = torch.tensor([[p[a] * f for a in range(3) for f in frequencies[a]] for p in positions])
    assert torch.allclose(plan.joint.rotary.cos, angles.cos(), atol=1e-6)
    assert torch.allclose(plan.joint.rotary.sin, angles.sin(), atol=1e-6)
    assert torch.equal(plan.image.rotary.cos, plan.joint.rotary.cos[[2, 3, 4, 5, 6, 7, 8, 9]])


def test_a_layer_without_tokens_does_nothing(sampler: MammothModa2Sampler) -> None:
    """A pack of unconditional rows alone has no context at all."""
    cases = [case for case in CASES if not case[1]]
    assert all(velocity.isfinite().all() for velocity in packed(sampler.transformer, cases))


@pytest.mark.parametrize(("width", "proposed", "heads"), [(2304, 18, 18), (3584, 28, 28), (100, 3, 1), (384, 5, 3)])
def test_heads_divide_the_width(width: int, proposed: int, heads: int) -> None:
    assert valid_heads(width, proposed) == heads


def test_the_default_refiner() -> None:
    with torch.device("meta"):
        refiner = QFormer(RefinerConfig(), 3584, 2304)
    assert refiner.query.shape == (1, 128, 2304)
    assert (len(refiner.layers), refiner.layers[0].self_attn.num_heads) == (2, 18)


def test_the_real_sizes() -> None:
    """About two billion parameters, 24 query and 8 key heads of 96, feed-forwards of 4 times the width."""
    from ditpack.models.mammoth_config import MammothModa2Config

    with torch.device("meta"):
        model = MammothModa2Transformer(MammothModa2Config(), SDPA.load())
    block = model.layers[0]
    assert (block.attn.to_q.out_features, block.attn.to_k.out_features, block.attn.head_dim) == (2304, 768, 96)
    assert block.feed_forward.linear_1.out_features == 9216
    assert block.modulation.in_features == 1024
    assert 2.2e9 < sum(parameter.numel() for parameter in model.parameters()) < 2.8e9
