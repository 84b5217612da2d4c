"""The optimiser of the embedded model's training: Muon in batches against PyTorch's, and kernels seen as matrices."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from ditpack.demo_model.train.muon import Muon
from ditpack.demo_model.train.optimiser import Optimiser

WEIGHTS = re.compile("weight")


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (24, 8), (8, 24), (8, 8), (24, 8), (6, 10)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def test_it_equals_pytorchs() -> None:
    """Several steps, so that the momentum counts; a matrix without a gradient stays as it is."""
    ours, theirs = matrices(), matrices()
    mine = Muon(ours, 0.02, 0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for a, b in zip(ours[:-1], theirs[:-1], strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4)  # the iterations are in bf16
    assert torch.equal(ours[-1], matrices()[-1])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_kernels_of_convolutions_are_matrices(memory_format: torch.memory_format) -> None:
    """The same step, however the kernel lies in memory; what is no matrix is AdamW's."""
    conv = nn.Conv2d(5, 7, 3).to(memory_format=memory_format)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        conv.weight.copy_(torch.randn(conv.weight.shape, generator=generator))
        conv.bias.copy_(torch.randn(7, generator=generator))
        pictures = torch.randn(2, 5, 8, 8, generator=generator).to(memory_format=memory_format)
    plain = conv.weight.detach().contiguous().clone()
    flat = nn.Parameter(plain.flatten(1).clone())
    optimiser = Optimiser(conv.named_parameters(), 0.1, hidden=WEIGHTS, hidden_rate=0.1)
    alone = Muon([flat], 0.1 / 200, 0.0)  # the first of the steps that warm up

    loss = conv(pictures).square().mean()
    gradient, _ = torch.autograd.grad(loss, [conv.weight, conv.bias], retain_graph=True)
    norm = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(conv.parameters()), retain_graph=True)]
    ).norm()
    flat.grad = gradient.contiguous().flatten(1) / max(1.0, float(norm))
    before = conv.bias.detach().clone()
    optimiser.step(loss, 0.0)
    alone.step()

    torch.testing.assert_close(conv.weight.flatten(1), flat, rtol=0, atol=1e-5)
    assert not torch.equal(conv.weight, plain)
    assert not torch.equal(conv.bias, before)


def test_a_state_goes_on_where_it_was() -> None:
    def run(steps: range, state: dict[str, object] | None, weights: nn.Module) -> dict[str, object]:
        optimiser = Optimiser(weights.named_parameters(), 0.1, hidden=WEIGHTS, hidden_rate=0.1)
        if state:
            optimiser.load(state)
        for step in steps:
            data = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            optimiser.step(weights(data).square().mean(), step / 8)
        return optimiser.state()

    torch.manual_seed(3)
    whole = nn.Linear(3, 5)
    halves = copy.deepcopy(whole)
    run(range(8), None, whole)
    run(range(4, 8), copy.deepcopy(run(range(4), None, halves)), halves)
    assert torch.equal(whole.weight, halves.weight)
