"""MammothModa2's sampler on the GPU: fp32 against the CPU, bf16 packed against alone, and a host that never waits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from mammoth_tools import Answer, conditioning, mixed

from ditpack.attention import select_attention
from ditpack.models import kernels, sandwich
from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import load_sampler
from ditpack.models.mammoth_request import MammothRequest
from ditpack.models.rotary import Rotary
from ditpack.sampling.mammoth_moda2 import MammothModa2Sampler

Requests = list[tuple[MammothRequest, Answer]]


def load(path: Path, device: str, dtype: torch.dtype) -> MammothModa2Sampler:
    sampler = load_sampler(open_checkpoint(path), torch.device(device), dtype)
    assert isinstance(sampler, MammothModa2Sampler)
    return sampler


def denoise(
    sampler: MammothModa2Sampler,
    requests: Requests,
    steps: int | None = None,
    noise: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The latents after all or the first ``steps`` steps, from ``noise`` [tokens, channels] where it is given."""
    members = [sampler.begin(request, conditioning(sampler, given)) for request, given in requests]
    for member, given in zip(members, noise or [], strict=False):
        member.latents = given.to(sampler.device)
    while active := [m for m in members if m.steps_left and (steps is None or m.step < steps)]:
        pack = sampler.pack(active)
        torch.cuda.set_sync_debug_mode("error" if sampler.device.type == "cuda" else "default")
        try:
            for _ in range(pack.steps_left if steps is None else 1):
                sampler.step(pack)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [sampler.finish(member)() for member in members]


def test_fp32_on_the_gpu_equals_the_cpu(mammoth_checkpoint: Path) -> None:
    """Step by step it also proves that no step waits for the device: a wait is an error there."""
    expected = denoise(load(mammoth_checkpoint, "cpu", torch.float32), mixed())
    for a, b in zip(denoise(load(mammoth_checkpoint, "cuda", torch.float32), mixed()), expected, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-3


@pytest.mark.parametrize("checkpoint", ["mammoth_checkpoint", "mammoth_dev_checkpoint"])
def test_bf16_packed_is_near_alone_and_near_fp32(checkpoint: str, request: pytest.FixtureRequest) -> None:
    """After two steps, before a random model's rounding has grown. Noise in bf16 is another than in fp32."""
    path: Path = request.getfixturevalue(checkpoint)
    reference = load(path, "cpu", torch.float32)
    noise = [
        reference.begin(each, conditioning(reference, given)).latents.bfloat16().float() for each, given in mixed()
    ]
    exact = denoise(reference, mixed(), steps=2, noise=noise)
    sampler = load(path, "cuda", torch.bfloat16)
    together = denoise(sampler, mixed(), steps=2, noise=noise)
    for entry, start, ours, theirs in zip(mixed(), noise, together, exact, strict=True):
        (alone,) = denoise(sampler, [entry], steps=2, noise=[start])
        assert float((ours - alone).norm() / alone.norm()) < 0.05
        assert float((ours - theirs).norm() / theirs.norm()) < 0.15


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("width", [48, 2304])
def test_kernels_equal_their_definition(
    dtype: torch.dtype, bound: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes of a layer, with and without the kernels: strided modulation, a head size that is no power of two."""

    def norm(size: int) -> torch.nn.RMSNorm:
        made = torch.nn.RMSNorm(size, eps=1e-5, device="cuda", dtype=dtype).requires_grad_(False)
        made.weight.normal_(1, 0.2)
        return made

    def passes() -> list[torch.Tensor]:
        stream = sandwich.Stream(x.clone(), rows)
        first = stream.norm(norms[0], scale)
        stream.add(update, norms[1], gate)
        second = stream.norm(norms[2], scale)
        stream.add(update, norms[1], gate)
        rotated = [sandwich.norm_rotate(heads.clone(), norms[3], rotary) for heads in (q, q[:, :1].contiguous())]
        return [first, second, stream.end(), *rotated, sandwich.silu_mul(x.clone(), update)]

    torch.manual_seed(0)
    rows = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2], device="cuda")
    x, update = torch.randn(2, len(rows), width, device="cuda", dtype=dtype)
    scale, gate, *_ = torch.randn(3, 4 * width, device="cuda", dtype=dtype).chunk(4, dim=1)
    q = torch.randn(len(rows), 24, 96, device="cuda", dtype=dtype)
    norms = [norm(width), norm(width), norm(width), norm(96)]
    angles = 6 * torch.rand(len(rows), 48, device="cuda")
    rotary = Rotary(angles.cos(), angles.sin())
    ours = passes()
    monkeypatch.setattr(kernels, "usable", lambda _: False)
    for a, b in zip(ours, passes(), strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < bound


@pytest.mark.parametrize("name", ["flash4", "flash3", "flash2", "torch_varlen", "cudnn", "sdpa"])
def test_backends_group_queries(name: str) -> None:
    """With the real head shape: 24 query heads share 8 key heads of 96. What is not installed is skipped."""
    try:
        select_attention(name, torch.device("cuda"), torch.bfloat16, 24, 96, 8)  # compares with sdpa in fp32
    except ValueError as error:
        if "wrong results" in str(error):
            raise
        pytest.skip(str(error))
