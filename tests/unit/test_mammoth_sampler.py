"""Denoising MammothModa2 requests through the engine: the same alone, packed and in the plain reference loop."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from engine_tools import TIMEOUT, Hooked, Ticket, engine, has_seed
from mammoth_oracle import Oracle
from mammoth_tools import LIMITS, Answer, answer, conditioning, mammoth_request, mammoth_sampler, mixed
from oracle import relative_error
from torch import Tensor

from ditpack.attention.sdpa import SDPA
from ditpack.engine.job import Result, StepStats
from ditpack.errors import GenerationFailed, InvalidRequest
from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import UnusableError, load_sampler
from ditpack.models.mammoth_moda2 import MammothModa2Transformer, Plan
from ditpack.models.mammoth_request import MammothRequest, resolve
from ditpack.models.tiny_mammoth import write_tiny_mammoth_checkpoint
from ditpack.packing.layout import Row
from ditpack.sampling.knee import measure_knee
from ditpack.sampling.latents import unpack_latents
from ditpack.sampling.mammoth_moda2 import Conditioning, Denoising, MammothModa2Sampler, Pack, schedule


@pytest.fixture(scope="module")
def sampler(mammoth_checkpoint: Path) -> MammothModa2Sampler:
    return mammoth_sampler(mammoth_checkpoint)


def ticket(sampler: MammothModa2Sampler, request: MammothRequest, given: Answer) -> Ticket:
    return Ticket(request, conditioning=conditioning(sampler, given))


def denoise(sampler: MammothModa2Sampler, *requests: tuple[MammothRequest, Answer]) -> list[Tensor]:
    """As the engine does it: a pack lasts as long as it may, and is then built anew."""
    members = [sampler.begin(request, conditioning(sampler, given)) for request, given in requests]
    while active := [member for member in members if member.steps_left]:
        pack = sampler.pack(active)
        for _ in range(pack.steps_left):
            sampler.step(pack)
    return [sampler.finish(member)() for member in members]


def reference(oracle: Oracle, request: MammothRequest, given: Answer) -> Tensor:
    with torch.inference_mode():
        return oracle.denoise(
            torch.from_numpy(given.states),
            given.ids.tolist(),
            given.start,
            (request.width, request.height),
            request.num_inference_steps,
            request.guidance_scale,
            request.cfg_range,
            request.seed,
        )


@pytest.mark.parametrize("checkpoint", ["mammoth_checkpoint", "mammoth_dev_checkpoint"])
def test_packed_and_joining_late_equals_solo_and_the_reference(checkpoint: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(checkpoint)
    sampler, oracle = mammoth_sampler(path), Oracle(path)
    requests = mixed()
    tickets = [ticket(sampler, *entry) for entry in requests]
    left = iter(tickets[2:])

    def one_more_joins(pack: Pack) -> None:
        if (late := next(left, None)) is not None:
            served.submit(late.job)

    both = threading.Event()
    served = engine(Hooked(sampler, step=one_more_joins, begin=lambda *_: both.wait(TIMEOUT)))
    for first in tickets[:2]:
        served.submit(first.job)
    both.set()
    for late, entry in zip(tickets, requests, strict=True):
        outcome = late.outcome()
        assert isinstance(outcome, Result)
        assert relative_error(outcome.latents, reference(oracle, *entry)) < 1e-5
        assert relative_error(outcome.latents, denoise(sampler, entry)[0]) < 1e-5
        assert outcome.info["steps"] == entry[0].num_inference_steps
    served.close(TIMEOUT)
    assert all(len(late.outcomes) == 1 for late in tickets)


def test_an_unconditional_row_exists_only_while_guidance_is_active(sampler: MammothModa2Sampler) -> None:
    stats: list[StepStats] = []
    served = engine(sampler, on_step=stats.append)
    only = ticket(sampler, mammoth_request(num_inference_steps=10, cfg_range=[0.3, 0.7]), answer(3, 4))
    served.submit(only.job)
    only.latents()
    served.close(TIMEOUT)
    assert [step.rows for step in stats] == [1, 1, 1, 2, 2, 2, 2, 2, 1, 1]  # both ends included
    assert [step.tokens for step in stats] == [26, 26, 26, *[42] * 5, 26, 26]


def test_a_pack_ends_where_its_rows_change(sampler: MammothModa2Sampler) -> None:
    requests = [
        (mammoth_request(num_inference_steps=10, cfg_range=[0, 0.4], seed=1), answer(3, 4)),
        (mammoth_request(num_inference_steps=8, cfg_range=[0.25, 1], seed=2), answer(9, 2)),
    ]
    members = [sampler.begin(request, conditioning(sampler, given)) for request, given in requests]
    lengths, guided = [], []
    while active := [member for member in members if member.steps_left]:
        pack = sampler.pack(active)
        lengths.append(pack.steps_left)
        guided.append(sorted(member.request.seed for member in active if member.guided))
        for _ in range(pack.steps_left):
            sampler.step(pack)
    assert lengths == [2, 3, 3, 2]
    assert guided == [[1], [1, 2], [2], []]


def test_no_guidance_at_all_is_the_conditional_prediction(
    sampler: MammothModa2Sampler, mammoth_checkpoint: Path
) -> None:
    given = answer(4, 5)
    plain = mammoth_request(guidance_scale=1.0)
    (off,) = denoise(sampler, (plain, given))
    never = mammoth_request(guidance_scale=8.0, cfg_range=[0.9, 0.95])  # between 3/4 and 4/4
    assert torch.equal(off, denoise(sampler, (never, given))[0])
    assert relative_error(off, reference(Oracle(mammoth_checkpoint), plain, given)) < 1e-5
    assert not torch.allclose(off, denoise(sampler, (mammoth_request(), given))[0], atol=0.01)


class BrokenUnconditional:
    """A transformer whose unconditional rows come out as NaN."""

    def __init__(self, model: MammothModa2Transformer) -> None:
        self.model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def __call__(self, image: Tensor, context: Tensor, timesteps: Tensor, plan: Plan) -> Tensor:
        out = self.model(image, context, timesteps, plan)
        without_text = torch.tensor([row.text_tokens == 0 for row in plan.joint.layout.rows])
        return torch.where(without_text[plan.image.rows].unsqueeze(1), torch.nan, out)


def test_nan_in_the_unconditional_branch_reaches_no_inactive_row(
    sampler: MammothModa2Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = answer(4, 5)
    guided = (mammoth_request(seed=1), given)
    inactive = (mammoth_request(guidance_scale=1.0, seed=2, width=32), given)
    later = (mammoth_request(cfg_range=[1, 1], seed=3), given)
    expected = denoise(sampler, guided, inactive, later)
    monkeypatch.setattr(sampler, "transformer", BrokenUnconditional(sampler.transformer))
    first, second, third = denoise(sampler, guided, inactive, later)
    assert not first.isfinite().any()
    assert torch.equal(second, expected[1])
    assert torch.equal(third, expected[2])


def test_a_request_that_ends_in_nan_fails_alone(sampler: MammothModa2Sampler) -> None:
    good = ticket(sampler, mammoth_request(seed=2), answer(4, 5))
    bad = Ticket(mammoth_request(seed=3), conditioning=Conditioning(torch.full((9, 24), torch.nan), 4))
    everybody = threading.Event()
    served = engine(Hooked(sampler, begin=lambda *_: everybody.wait(TIMEOUT)))
    for one in (bad, good):
        served.submit(one.job)
    everybody.set()
    assert isinstance(bad.outcome(), GenerationFailed)
    alone = denoise(sampler, (mammoth_request(seed=2), answer(4, 5)))[0]
    assert relative_error(good.latents(), alone) < 1e-5
    served.close(TIMEOUT)


def test_a_forward_that_raises_kills_only_the_guilty(sampler: MammothModa2Sampler) -> None:
    def explode(pack: Pack) -> None:
        if has_seed(4)(pack):
            raise RuntimeError("boom")

    served = engine(Hooked(sampler, step=explode))
    tickets = [ticket(sampler, mammoth_request(seed=seed), answer(seed, 5)) for seed in (2, 4, 5)]
    for one in tickets:
        served.submit(one.job)
    outcomes = [one.outcome() for one in tickets]
    served.close(TIMEOUT)
    assert [type(outcome) for outcome in outcomes] == [Result, GenerationFailed, Result]


def test_seeds_are_the_requests_own(sampler: MammothModa2Sampler) -> None:
    """One that was sent without a seed draws its own and leaves the others theirs."""
    given = answer(4, 5)
    seeded = (mammoth_request(seed=5), given)
    unseeded = [(resolve({"NUM_INFERENCE_STEPS": 4, "WIDTH": 32, "HEIGHT": 32}, LIMITS), given) for _ in range(2)]
    assert unseeded[0][0].seed != unseeded[1][0].seed
    together = denoise(sampler, unseeded[0], seeded, unseeded[1])
    assert relative_error(together[1], denoise(sampler, seeded)[0]) < 1e-5
    assert not torch.allclose(together[0], together[2], atol=0.01)


def test_a_preview_is_what_the_last_step_predicts(sampler: MammothModa2Sampler, mammoth_checkpoint: Path) -> None:
    """x + (1 - t) · v, which after the last step is the result."""
    given, plain = answer(4, 5), mammoth_request(guidance_scale=1.0, num_inference_steps=3)
    member = sampler.begin(plain, conditioning(sampler, given))
    with pytest.raises(ValueError, match="no step"):
        sampler.preview(member)
    noise = unpack_latents(member.latents, member.grid, channel_last=True)
    pack = sampler.pack([member])
    sampler.step(pack)
    states, text = conditioning(sampler, given).states, 4
    velocity = Oracle(mammoth_checkpoint).velocity(noise, 0.0, states[:text], states[text:])
    assert relative_error(sampler.preview(member)(), noise + velocity) < 1e-5
    for _ in range(2):
        sampler.step(pack)
    assert torch.equal(sampler.preview(member)(), sampler.finish(member)())


def test_the_schedule() -> None:
    """0 = noise, 1 = data; a 1024² image, 128² latent pixels, is shifted by 3.2, one of 40² not at all."""
    assert schedule(4, 40 * 40) == [0.0, 0.25, 0.5, 0.75, 1.0]
    shifted = schedule(4, 128 * 128)
    assert shifted == pytest.approx([0.0, 0.25 / (3.2 * 0.75 + 0.25), 0.5 / (1.6 + 0.5), 0.75 / (0.8 + 0.75), 1.0])
    assert schedule(1, 64) == [0.0, 1.0]


def test_the_warm_up_request_passes_every_check(sampler: MammothModa2Sampler) -> None:
    request, given = sampler.example(16)
    served = engine(sampler)
    example = Ticket(request, conditioning=given)
    served.submit(example.job)
    assert example.latents().isfinite().all()
    served.close(TIMEOUT)
    (row,) = sampler.rows(request, given)
    assert row == Row(1 + 7, ((4, 4),))


def test_the_token_budget_can_be_measured(sampler: MammothModa2Sampler) -> None:
    assert set(measure_knee(sampler, (16, 64)).rates) == {16, 64}


def test_what_is_not_made_for_the_family_is_refused(mammoth_checkpoint: Path) -> None:
    checkpoint, cpu = open_checkpoint(mammoth_checkpoint), torch.device("cpu")
    with pytest.raises(UnusableError, match="must be none for MammothModa2"):
        load_sampler(checkpoint, cpu, torch.float32, quantization="fp8")
    with pytest.raises(UnusableError, match="flash3 runs on cuda"):
        load_sampler(checkpoint, cpu, torch.float32, attention="flash3")


def test_the_same_seed_writes_the_same_checkpoint(mammoth_checkpoint: Path, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        write_tiny_mammoth_checkpoint(tmp_path / str(seed), seed)
        for file in sorted(path.name for path in mammoth_checkpoint.glob("*.safetensors")):
            equal = (tmp_path / str(seed) / file).read_bytes() == (mammoth_checkpoint / file).read_bytes()
            assert equal == same


BAD = [
    (torch.zeros(5), 1, r"CONDITIONS = \[5\]: must have shape \[tokens, 24\]"),
    (torch.zeros(5, 23), 1, r"CONDITIONS = \[5, 23\]"),
    (torch.zeros(5, 24), -1, "TEXT_TOKENS = -1: must be between 0 and 4"),
    (torch.zeros(5, 24), 5, "TEXT_TOKENS = 5: must be between 0 and 4"),
    (torch.zeros(0, 24), 0, "TEXT_TOKENS = 0"),
    (torch.zeros(195, 24), 194, "201 tokens of conditioning.*must not exceed 199"),
]


@pytest.mark.parametrize(("states", "text_tokens", "message"), BAD)
def test_conditions_that_do_not_fit_are_refused_before_they_meet_anybody(
    sampler: MammothModa2Sampler, states: Tensor, text_tokens: int, message: str
) -> None:
    served = engine(sampler)
    good = ticket(sampler, mammoth_request(), answer(4, 5))
    served.submit(good.job)
    with pytest.raises(InvalidRequest, match=message):
        served.submit(Ticket(mammoth_request(), conditioning=Conditioning(states, text_tokens)).job)
    assert isinstance(good.outcome(), Result)
    served.close(TIMEOUT)


def test_a_side_longer_than_the_rotary_tables_is_refused(sampler: MammothModa2Sampler) -> None:
    with pytest.raises(InvalidRequest, match="WIDTH = 3216: must not exceed 3200"):
        sampler.rows(mammoth_request(width=3216), conditioning(sampler, answer(1, 1)))


def test_nothing_is_read_from_the_device(sampler: MammothModa2Sampler) -> None:
    """On the meta device, which has no values: guidance coming and going included."""
    with torch.device("meta"):
        transformer = MammothModa2Transformer(sampler.config, SDPA.load())
    blind = MammothModa2Sampler(transformer, sampler.pixels_per_patch)
    members: list[Denoising] = [blind.begin(request, conditioning(blind, given)) for request, given in mixed()]
    while active := [member for member in members if member.steps_left]:
        pack = blind.pack(active)
        for _ in range(pack.steps_left):
            blind.step(pack)
            blind.throttle()
